"""Which implementation runs where, and what is said about it."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import B200, CPU, H200, Device, describe
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.rms_norm.api import add_rms_norm
from pallas_kernels.rope_write import api as rope_write
from pallas_kernels.verify_attention.api import verify_attention
from tests.kernels.experts import mixture


@pytest.fixture(autouse=True)
def nothing_said_yet():
    dispatch._once.cache_clear()


def gpu(kind: str, capability: str, cores: int = 132, version="PJRT C API\ncuda 13000"):
    """A jax device, as far as `describe` looks at one; jax calls the GPUs of all vendors "gpu"."""
    return SimpleNamespace(
        platform="gpu",
        device_kind=kind,
        client=SimpleNamespace(platform_version=version),
        compute_capability=capability,
        core_count=cores,
    )


def tpu(kind: str) -> SimpleNamespace:
    """A jax device of a TPU; it has no compute capability."""
    return SimpleNamespace(platform="tpu", device_kind=kind)


WITH_KERNELS = {
    "H100": (gpu("NVIDIA H100 80GB HBM3", "9.0"), 90, "sm_90"),
    "GB200": (gpu("NVIDIA GB200", "10.0", 152), 100, "sm_100"),
}
"""Name -> (stand-in, generation whose kernels it runs, architecture)."""

WITHOUT_KERNELS = {
    "A100": gpu("NVIDIA A100-SXM4-80GB", "8.0", 108),
    "L4": gpu("NVIDIA L4", "8.9", 58),
    "RTX 5090": gpu("NVIDIA GeForce RTX 5090", "12.0", 170),
    "Thor": gpu("NVIDIA Thor", "11.0", 20),
    "unknown NVIDIA": gpu("NVIDIA X", "13.0", 200),
    "MI300X": gpu("AMD Instinct MI300X", "gfx942", 304, "PJRT C API\nrocm 70200"),
    "Intel Max": gpu("Intel(R) Data Center GPU Max 1550", "12.0", 128, "PJRT C API\noneAPI 2025"),
    "v5e": tpu("TPU v5 lite"),
    "v6e": tpu("TPU v6 lite"),
    "7x": tpu("TPU7x"),
    "another platform": SimpleNamespace(platform="METAL", device_kind="Metal"),
}


@pytest.fixture
def default(monkeypatch):
    """Makes a stand-in the default device, as jax would report it."""

    def set_default(device: SimpleNamespace) -> None:
        monkeypatch.setattr(dispatch, "default_device", lambda: device)

    return set_default


def test_chips_are_known_by_name_and_others_by_generation():
    assert describe(gpu("NVIDIA H200", "9.0")) is H200
    assert describe(gpu("NVIDIA B200", "10.0", 148)) is B200
    assert describe(gpu("NVIDIA H20", "9.0", 78)) == Device("NVIDIA H20", 90, 78, H200.smem_bytes)
    assert describe(jax.devices("cpu")[0]) == CPU


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_chip_of_a_known_generation_runs_its_kernels(name, default, caplog):
    device, sm, arch = WITH_KERNELS[name]
    default(device)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for requested in (None, "mosaic_gpu"):
            launch = dispatch.resolve("op", requested, chips=(90, 100))
            assert launch == dispatch.Launch(describe(device))
    assert (launch.device.sm, launch.device.arch) == (sm, arch)
    assert launch.device.smem_bytes > 0
    assert launch.device.num_sms == device.core_count
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"mosaic_gpu implementation on {device.device_kind} ({arch})" in record.getMessage()


@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_any_other_chip_runs_references_and_one_line_says_why(name, default, caplog):
    device = WITHOUT_KERNELS[name]
    default(device)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for op in ("one", "another"):
            assert dispatch.resolve(op, None, chips=(90, 100)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert f"run their reference implementation on {describe(device)}" in said
    assert device.device_kind in said
    if device.platform == "tpu":
        assert said.startswith("operations without a kernel for TPUs")
    else:
        assert said.startswith("all operations")
        assert said.endswith("the kernels are for TPUs and NVIDIA GPUs: sm_90, sm_100")


@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_a_kernel_asked_for_on_any_other_chip_is_refused(name, default):
    default(WITHOUT_KERNELS[name])
    kind = WITHOUT_KERNELS[name].device_kind
    with pytest.raises(NotImplementedError) as caught:
        dispatch.resolve("op", "mosaic_gpu", chips=(90, 100))
    assert kind in str(caught.value)
    assert "its kernel is for" in str(caught.value)
    assert "use implementation='reference'" in str(caught.value)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_the_reference_answers_on_any_other_chip(name, default):
    """Through the public functions of every operation that a round of a mixture of experts uses."""
    results = lambda: jax.tree.leaves(_every_operation())
    wanted = results()
    default(WITHOUT_KERNELS[name])
    for found, right in zip(results(), wanted, strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(right), rtol=0.02, atol=0.02)
    with pytest.raises(NotImplementedError, match="use implementation='reference'"):
        _every_operation("mosaic_gpu")


def _every_operation(implementation=None) -> list:
    """Results of small calls of all operations, in bfloat16."""
    B, T, D, E, k = 1, 2, 256, 32, 2
    keys = iter(jax.random.split(jax.random.key(0), 12))
    rand = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16) / 4
    how = dict(implementation=implementation)
    x, pages = rand(B, T, D), (rand(5, 16, 2, 64), rand(5, 16, 2, 64))
    where = dict(
        page_table=jnp.array([[1, 2, 3, 4]]), positions=jnp.array([[3, 4]]) + jnp.zeros((B, T), int)
    )
    form = rope_write.Form(num_heads=4, dtype=jnp.bfloat16)
    angles = (jnp.ones((B, T, 32)), jnp.zeros((B, T, 32)))
    q, *written = rope_write.rope_write(
        linear(x, rand(512, D), **how)[..., : form.width(2, 64)],
        *pages,
        angles=angles,
        form=form,
        **where,
        **how,
    )
    attended = verify_attention(q, *written, scale=0.125, **where, **how)
    normed = add_rms_norm(x, x, jnp.ones(D), eps=1e-6, **how)
    logits = rand(T, E).astype(jnp.float32)
    wide = [rand(*shape).astype(jnp.float32) for shape in ((T, D), (E, 2, 32, D), (E, D, 32))]
    experts = map(ExpertWeights, wide[1:])  # float32: in bfloat16 a TPU has a kernel
    mixed = mixture(wide[0], logits, *experts, top_k=k, normalize=True, **how)
    return [q, written, attended, normed, mixed]


def test_a_generation_without_this_kernel_is_one_line_an_operation(default, caplog):
    default(gpu("NVIDIA B200", "10.0", 148))
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for op in ("one", "one", "another"):
            assert dispatch.resolve(op, None, chips=(90,)) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{op} runs its reference implementation on NVIDIA B200 (sm_100): its kernel is for sm_90"
        for op in ("one", "another")
    ]


@pytest.mark.parametrize("name", ["v5e", "v6e", "7x"])
def test_a_kernel_for_tpus_runs_on_tpus_only(name, default, caplog):
    device = WITHOUT_KERNELS[name]
    run = lambda requested: dispatch.resolve("op", requested, chips=(90,), tpu_refusal=None)
    assert run("mosaic_tpu").interpret  # on a CPU
    default(device)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for requested in (None, "mosaic_tpu"):
            assert run(requested) == dispatch.Launch(describe(device))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    with pytest.raises(NotImplementedError, match="its kernel is for NVIDIA GPUs"):
        run("mosaic_gpu")
    default(gpu("NVIDIA H200", "9.0"))
    with pytest.raises(NotImplementedError, match=r"NVIDIA H200 \(sm_90\): its kernel is for TPUs"):
        run("mosaic_tpu")


def test_arguments_that_a_tpu_kernel_cannot_take_are_one_line_and_the_reference(default, caplog):
    default(WITHOUT_KERNELS["v6e"])
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(2):
            assert dispatch.resolve("op", None, tpu_refusal="rows are too long") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = "op runs its reference implementation on TPU v6 lite: rows are too long"
    assert record.getMessage() == said


def test_the_platform_is_that_of_the_assumed_device_or_of_the_default_one(default):
    assert dispatch.platform() == "cpu"
    default(WITHOUT_KERNELS["MI300X"])
    assert dispatch.platform() == "rocm"  # which jax calls "gpu"
    with dispatch.assume(Device("TPU v5 lite", platform="tpu")):
        assert dispatch.platform() == "tpu"
    with dispatch.assume(H200):
        assert dispatch.platform() == "cuda"


def test_the_device_is_the_one_that_jax_puts_arrays_on(monkeypatch):
    """A machine with a GPU may compute on its CPU."""
    cpu, h100 = jax.devices("cpu")[0], gpu("NVIDIA H100 80GB HBM3", "9.0")
    monkeypatch.setattr(
        jax, "local_devices", lambda backend=None: [cpu] if backend == "cpu" else [h100]
    )
    assert dispatch.platform() == "cuda"
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert dispatch.platform() == "cpu"
            assert dispatch.resolve("op", None, chips=(90,)) is None
            assert dispatch.resolve("op", "mosaic_gpu", chips=(90,)).interpret is not None


def test_an_assumed_chip_decides_as_if_it_were_there():
    with dispatch.assume(B200):
        assert dispatch.resolve("op", None, chips=(90, 100)) == dispatch.Launch(B200)
        assert dispatch.resolve("op", "mosaic_gpu", chips=(100,)) == dispatch.Launch(B200)
        assert dispatch.resolve("op", None, chips=(90,)) is None
        assert dispatch.resolve("op", "reference", chips=(100,)) is None
        with dispatch.assume(H200):
            assert dispatch.resolve("op", None, chips=(90,)).device is H200
        assert dispatch.resolve("op", None, chips=(100,)).device is B200
    assert dispatch.resolve("op", None, chips=(90,)) is None


@pytest.mark.parametrize(
    ("chips", "refusal", "why"),
    [
        ((100,), None, r"NVIDIA H200 \(sm_90\): its kernel is for sm_100"),
        ((), None, "it has no kernel for any chip"),
        ((90,), "rows are too long", "rows are too long"),
    ],
)
def test_a_kernel_asked_for_in_vain_is_an_error(chips, refusal, why):
    with pytest.raises(NotImplementedError, match=f"op has no mosaic_gpu kernel.*{why}"):
        dispatch.resolve("op", "mosaic_gpu", chips=chips, refusal=refusal)


def test_a_block_changes_its_own_fields_of_the_trace_and_ends_with_them():
    before = dispatch.trace()
    with dispatch.assume(H200), dispatch.references(rounded=True), dispatch.traced(num_devices=2):
        with dispatch.as_served():
            assert dispatch.trace() == dispatch.Trace(H200, num_devices=2)
        assert dispatch.trace() == dispatch.Trace(H200, True, True, 2)
        with pytest.raises(ZeroDivisionError), dispatch.traced(num_devices=1):
            _ = 1 / 0
        assert dispatch.trace().num_devices == 2
    assert dispatch.trace() is before
