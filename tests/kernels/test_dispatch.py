"""Which implementation runs where, and what is said about it."""

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import B200, H200, Device, describe


@pytest.fixture(autouse=True)
def nothing_said_yet():
    dispatch._say.cache_clear()


def gpu(kind: str, capability: str, cores: int = 132) -> SimpleNamespace:
    """A jax device, as far as `describe` looks at one."""
    return SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability, core_count=cores
    )


def test_chips_are_known_by_name_and_others_by_generation():
    assert describe(gpu("NVIDIA H200", "9.0")) is H200
    assert describe(gpu("NVIDIA B200", "10.0", 148)) is B200
    assert describe(gpu("NVIDIA H20", "9.0", 78)) == Device("NVIDIA H20", 90, 78, H200.smem_bytes)
    assert describe(gpu("NVIDIA A100", "8.0")) is None
    assert describe(jax.devices("cpu")[0]) is None


def test_a_cpu_runs_the_reference_unless_asked_for_the_kernel():
    assert dispatch.resolve("op", None, chips=(90,)) is None
    assert dispatch.resolve("op", "reference", chips=(90,)) is None
    launch = dispatch.resolve("op", "mosaic_gpu", chips=(90,))
    assert launch.device == H200
    assert launch.interpret is not None


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


def test_references_replace_kernels_that_are_asked_for():
    with dispatch.assume(H200), dispatch.references():
        assert dispatch.resolve("op", "mosaic_gpu", chips=(90,)) is None
    assert dispatch.resolve("op", "mosaic_gpu", chips=(90,)) is not None


@pytest.mark.parametrize(
    ("chips", "refusal", "why"),
    [
        ((100,), None, "none is made for NVIDIA H200"),
        ((), None, "none is made for NVIDIA H200"),
        ((90,), "rows are too long", "rows are too long"),
    ],
)
def test_a_kernel_asked_for_in_vain_is_an_error(chips, refusal, why):
    with pytest.raises(NotImplementedError, match=f"op has no mosaic_gpu kernel.*{why}"):
        dispatch.resolve("op", "mosaic_gpu", chips=chips, refusal=refusal)


def test_a_reference_on_a_gpu_is_a_warning_said_once(caplog):
    with dispatch.assume(H200), caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(3):
            assert dispatch.resolve("op", None, chips=(90,), refusal="rows are too long") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "op runs its reference implementation on NVIDIA H200: rows are too long"
    )


def test_a_kernel_and_a_cpu_are_said_quietly(caplog):
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        dispatch.resolve("op", None, chips=(90,))
        with dispatch.assume(H200):
            dispatch.resolve("op", None, chips=(90,))
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "op runs its reference implementation on cpu",
        "op runs its mosaic_gpu implementation on NVIDIA H200",
    ]
