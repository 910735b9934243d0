"""The tables of docs/portability.md say what the code does."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from bench import deviceless, deviceless_tpu, portability
from bench.portability import KERNELS, PARTS, PLATFORMS
from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import GENERATIONS
from pallas_kernels.moe.api import ExpertWeights, mixture
from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.rope_write.api import Form, rope_write
from pallas_kernels.verify_attention.api import verify_attention
from peagle_jax.runs import choose_dtype
from peagle_jax.training.attention import is_flash

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "portability.md"
_made = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
_INT = dict(dtype=jnp.int32)


def _products(implementation=None):
    run = lambda x, w: linear(x, w, implementation=implementation)
    return run, (_made(8, 512), _made(256, 512))


def _experts(implementation=None):
    how = dict(router_bias=None, top_k=4, normalize=True, implementation=implementation)
    run = lambda x, logits, *w: mixture(x, logits, *map(ExpertWeights, w), **how)
    logits = _made(8, 32, dtype=jnp.float32)
    return run, (_made(8, 512), logits, _made(32, 2, 256, 512), _made(32, 512, 256))


def _attention(implementation=None):
    def run(q, k, v, table, positions):
        how = dict(page_table=table, positions=positions, scale=1.0, implementation=implementation)
        return verify_attention(q, k, v, **how)

    where = _made(2, 64, **_INT), _made(2, 4, **_INT)
    return run, (_made(2, 4, 8, 64), *[_made(129, 16, 2, 64)] * 2, *where)


def _norms(implementation=None):
    def run(x, scale, qkv, k, v, cos, sin, table, positions):
        how = dict(page_table=table, positions=positions, implementation=implementation)
        form = Form(num_heads=8)
        return (
            rms_norm(x, scale, eps=1e-6, implementation=implementation),
            rope_write(qkv, k, v, angles=(cos, sin), form=form, **how),
        )

    angles = [_made(2, 4, 32, dtype=jnp.float32)] * 2
    where = _made(2, 64, **_INT), _made(2, 4, **_INT)
    pages = [_made(129, 16, 2, 64)] * 2
    return run, (_made(8, 512), _made(512), _made(2, 4, 768), *pages, *angles, *where)


CALLS = dict(zip(PARTS, (_products, _experts, _attention, _norms), strict=False))
"""Part -> a function of the requested implementation: an operation, and shapes of its arguments."""


@pytest.fixture(params=PLATFORMS)
def platform(request, monkeypatch):
    """A platform whose device is the default one."""
    one = PLATFORMS[request.param]
    monkeypatch.setattr(dispatch, "_default_device", lambda: one.device)
    return one


@pytest.mark.parametrize("part", CALLS)
def test_a_part_has_the_kernels_that_the_table_names(part, platform):
    function, shapes = CALLS[part]()
    traced = str(jax.make_jaxpr(function)(*shapes))
    named = KERNELS[part].get(platform.device.platform, "")
    generation = f"sm_{platform.device.sm}"
    has_kernel = generation in named if platform.device.sm else bool(named)
    # The primitives of `plgpu.kernel` and of `pl.pallas_call`.
    assert ("mpmd_map[" in traced or "pallas_call[" in traced) == has_kernel


@pytest.mark.parametrize("part", CALLS)
@pytest.mark.parametrize(
    "platform",
    [name for name, one in PLATFORMS.items() if one.on_request == "refused"],
    indirect=True,
)
def test_a_requested_kernel_is_refused_where_the_table_says_so(part, platform):
    function, shapes = CALLS[part]("mosaic_gpu")
    with pytest.raises(NotImplementedError) as caught:
        jax.make_jaxpr(function)(*shapes)
    assert str(platform.device) in str(caught.value)


@pytest.mark.parametrize(("keys", "seen", "reads"), [(128, 60, 1), (2048, 500, 1), (4096, 1000, 2)])
def test_attention_on_a_tpu_reads_blocks_of_512_keys_up_to_the_last_in_use(keys, seen, reads):
    """A key in a block past the last one in use is NaN: a read of it would show in the result."""
    tokens = 16
    table = jnp.arange(1, keys // tokens + 1)[None]
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    q = draw(0, 1, 4, 8, 64)
    pages = [draw(i, keys // tokens + 1, tokens, 2, 64) for i in (1, 2)]
    first_unused = 1 + 512 * reads // tokens
    poisoned = [x.at[first_unused:].set(jnp.nan) for x in pages]
    where = dict(page_table=table, positions=seen - 4 + jnp.arange(4)[None], scale=0.125)
    with dispatch.assume(PLATFORMS["TPU v6e"].device):
        found = verify_attention(q, *poisoned, **where)
        traced = str(jax.make_jaxpr(lambda *x: verify_attention(*x, **where))(q, *pages))
    wanted = verify_attention(q, *pages, **where)
    assert jnp.abs(found - wanted).max() < 0.02
    assert ("while[" in traced) == (keys > 2 * 512)


def test_only_cuda_trains_with_cudnn(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: _backend(platform))
    assert is_flash("auto", jnp.bfloat16) == (platform.device.platform == "cuda")
    assert not is_flash("auto", jnp.float32)
    assert is_flash("cudnn", jnp.float32)


def test_accelerators_compute_in_bfloat16_by_default(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: _backend(platform))
    wanted = "float32" if platform.device.platform == "cpu" else "bfloat16"
    assert choose_dtype("auto") == wanted
    assert choose_dtype("float32") == "float32"


def _backend(platform) -> str:
    """jax's name: GPUs of all vendors are "gpu"."""
    name = platform.device.platform
    return name if name in ("cpu", "tpu") else "gpu"


def test_compiled_is_said_of_chips_that_the_commands_compile_for(platform):
    known = {**deviceless.CHIPS, **deviceless_tpu.CHIPS}
    if "compiled" in (*platform.checks, platform.on_request):
        assert known[platform.compiled_as] == platform.device
    if "reference" in platform.checks and platform.device.platform != "cpu":
        assert platform.checks[PARTS.index("experts")] == "reference"


def test_measured_is_said_of_devices_with_results(platform):
    rows = [
        json.loads(line)
        for path in (ROOT / "bench" / "results").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    timed = {row.get("platform") for row in rows} | {row.get("device") for row in rows}
    says_so = "measured" in (*platform.checks, platform.on_request)
    assert says_so == (platform.measured_as in timed and bool(platform.measured_as))


def test_every_word_has_a_meaning_and_every_part_a_word():
    for one in PLATFORMS.values():
        assert len(one.checks) == len(PARTS)
        assert {*one.checks, one.on_request} <= portability.WORDS.keys()
    generations = {one.device.sm for one in PLATFORMS.values()}
    assert generations >= GENERATIONS.keys()
    assert {one.device for one in PLATFORMS.values()} >= {*deviceless_tpu.CHIPS.values()}


def test_the_page_has_the_tables_as_they_are_made():
    page = PAGE.read_text(encoding="utf-8")
    assert portability.update(page) == page
    for name in portability.TABLES:
        assert f"<!-- portability:{name} -->" in page


def test_a_model_that_does_not_fit_has_no_floor(monkeypatch):
    small = {"small": SimpleNamespace(num_bytes=1e9, chip=portability.TPUS["v5e"].chip)}
    monkeypatch.setattr(portability, "TPUS", small)
    monkeypatch.setattr(portability, "MODELS", ("qwen3-0.6b",))
    assert portability.held().endswith("| qwen3-0.6b | 4.1 | does not fit |")
