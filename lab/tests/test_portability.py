"""The tables of README.md and docs/portability.md say what the code does and what tests show."""

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lab import deviceless, deviceless_tpu, portability
from lab.__main__ import main as lab_main
from lab.portability import KERNELS, ON_REQUEST, PAGES, PARTS, PLATFORMS, evidence
from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import GENERATIONS
from pallas_kernels.moe.api import mixture
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights
from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.rope_write.api import Form, rope_write
from pallas_kernels.verify_attention.api import verify_attention
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.cli.runs import choose_dtype
from peagle_jax.engine.device import programs
from peagle_jax.engine.device.compiler_options import compiler_options
from peagle_jax.engine.device.round_shapes import round_shapes
from peagle_jax.method.verify import verify
from peagle_jax.training.attention import is_flash
from tests import tiny
from tests.programs import one_bucket

ROOT = Path(__file__).parents[2]
_made = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
_INT = dict(dtype=jnp.int32)


def _products(implementation=None):
    run = lambda x, w: linear(x, w, implementation=implementation)
    return run, (_made(8, 512), _made(256, 512))


def _experts(implementation=None):
    """With their routing."""

    def run(x, logits, *weights):
        experts = Experts(*map(ExpertWeights, weights))
        return mixture(x, logits, Choice(4, True), experts, implementation=implementation)

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
    assert (word_of(platform, part) != "reference") == has_kernel


def word_of(platform, part: str) -> str:
    (name,) = (name for name, one in PLATFORMS.items() if one is platform)
    return evidence()[name][part].word


@pytest.mark.parametrize("part", CALLS)
@pytest.mark.parametrize(
    "platform",
    [name for name, one in evidence().items() if one[ON_REQUEST].word == "refused"],
    indirect=True,
)
def test_a_requested_kernel_is_refused_where_the_table_says_so(part, platform):
    function, shapes = CALLS[part]("mosaic_gpu")
    with pytest.raises(NotImplementedError) as caught:
        jax.make_jaxpr(function)(*shapes)
    assert str(platform.device) in str(caught.value)


@pytest.mark.sampled(1, slow=0)
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


def test_only_cuda_trains_with_cudnn(platform):
    assert is_flash(jnp.bfloat16) == (platform.device.platform == "cuda")
    assert not is_flash(jnp.float32)


def test_accelerators_compute_in_bfloat16_by_default(platform):
    wanted = "float32" if platform.device.platform == "cpu" else "bfloat16"
    assert choose_dtype("auto") == wanted
    assert choose_dtype("float32") == "float32"


def test_only_cuda_has_options_for_graphs_and_holes_in_memory(platform, monkeypatch):
    """CUDA graphs are jax's "gpu" too, but not AMD's or Intel's."""
    monkeypatch.setattr(programs, "carve_holes", lambda _: ["a hole"])
    made = programs.Programs(tiny.target(), None, EngineConfig(num_draft=0), taps=(), accept=verify)
    is_cuda = platform.device.platform == "cuda"
    assert bool(made._between_holes) == is_cuda
    assert bool(compiler_options()) == is_cuda


def test_a_cpu_compiles_fewer_values_of_k(platform):
    config = EngineConfig(num_draft=7, max_num_seqs=64, adaptive="load")
    name = platform.device.platform
    largest = [shape for shape in round_shapes(config, name) if shape.size == 64]
    assert (len(largest) == 3) == (name == "cpu")


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("name", ["AMD", "Intel"])
def test_an_engine_of_references_writes_the_text_of_a_cpu(name, reference_text):
    """The device of a plugin that is not here decides as if it were: dispatch, and what depends on
    it."""
    with dispatch.assume(PLATFORMS[name].device):
        assert dispatch.platform() == PLATFORMS[name].device.platform
        assert text_of_an_engine() == reference_text


@pytest.fixture(scope="module")
def reference_text() -> list:
    return text_of_an_engine()


def text_of_an_engine() -> list:
    """Tokens and acceptance of two requests with a random head, one greedy and one sampled."""
    target = tiny.target(**tiny.ONE_LAYER)
    sizes = dict(num_draft=3, max_num_seqs=2, max_model_len=64, page_size=8, prefill_chunk=16)
    config = EngineConfig(**sizes, dtype="float32")
    engine = one_bucket(Engine(target, tiny.head(**tiny.HEAD_OF_ONE_LAYER), config))
    params = [SamplingParams(max_tokens=12, temperature=t, seed=1) for t in (0.0, 0.8)]
    found = engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], params)
    return [(one.tokens, one.accepted_per_position) for one in found]


COMPILING = ("lab/tests/test_compile.py", "lab/tests/test_portability_tpu.py")


def test_compiled_is_said_of_chips_that_the_commands_compile_for():
    known = {**deviceless.CHIPS, **deviceless_tpu.CHIPS}
    for name, one in evidence().items():
        tests = [shown.test for shown in one.values() if shown.word == "compiled"]
        for test in tests:
            chip = PLATFORMS[name].compiled_as
            assert known[chip] == PLATFORMS[name].device
            assert test.startswith(COMPILING)
            assert chip in re.split(r"[\[\]@-]", test)


@functools.cache
def rows() -> list[dict]:
    paths = (ROOT / "bench" / "results").glob("*.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


TIMED = {
    "products": {"block_gemm"},
    "experts": {"moe"},
    "attention": {"verify_attention"},
    "norms, cache writes": {"rms_norm", "rope_write", "moe"},
    "whole round": set(),
}
"""Part -> operations with times of their own."""
MEASURED = [
    (name, part)
    for name, one in evidence().items()
    for part in TIMED
    if one[part].word == "measured"
]


@pytest.mark.parametrize(("name", "part"), MEASURED, ids=map("-".join, MEASURED))
def test_a_measured_part_has_rows(name, part):
    devices = PLATFORMS[name].measured_as
    own = [row for row in rows() if {row.get("platform"), row.get("device")} & set(devices)]
    assert any("ms_per_round" in row for row in own)
    assert TIMED[part] <= {row["op"] for row in own if row["kind"] == "kernel"}


def test_measured_is_said_of_every_device_with_rounds():
    devices = {
        row.get("platform") if row.get("platform") == "cpu" else row.get("device")
        for row in rows()
        if "ms_per_round" in row
    }
    measured = {device for name, _ in MEASURED for device in PLATFORMS[name].measured_as}
    assert devices == measured


def test_every_word_has_a_meaning_and_every_part_a_word():
    assert evidence().keys() == PLATFORMS.keys()
    words = {shown.word for one in evidence().values() for shown in one.values()}
    assert words == portability.WORDS.keys()
    generations = {one.device.sm for one in PLATFORMS.values()}
    assert generations >= GENERATIONS.keys()
    assert {one.device for one in PLATFORMS.values()} >= {*deviceless_tpu.CHIPS.values()}


def named_tests() -> list[str]:
    return sorted({shown.test for one in evidence().values() for shown in one.values()})


def test_the_tests_that_the_matrix_names_are_in_their_files():
    for test in named_tests():
        path, _, name = test.partition("::")
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {one.name for one in module.body if isinstance(one, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, test


@pytest.mark.slow
def test_the_cases_that_the_matrix_names_are_collected():
    files = sorted({test.partition("::")[0] for test in named_tests()})
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:]
    found = process.stdout.splitlines()
    cases = {*found, *(line.partition("[")[0] for line in found)}
    assert [test for test in named_tests() if test not in cases] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_as_they_are_made(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- portability:checked -->" in text
    assert portability.update(text) == text, (
        "run python -m lab matrix --pages README.md docs/portability.md"
    )


def test_every_table_stands_in_the_docs():
    text = (ROOT / "docs" / "portability.md").read_text(encoding="utf-8")
    assert all(f"<!-- portability:{name} -->" in text for name in portability.TABLES)


def test_the_command_prints_the_matrix_or_its_tests_or_redraws_pages(tmp_path, capsys):
    assert lab_main(["matrix"]) == 0
    assert capsys.readouterr().out.strip() == portability.checked()
    assert lab_main(["matrix", "--tests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PLATFORMS) * len(PARTS)
    assert all("tests/" in line for line in lines)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- portability:words -->\nold\n<!-- /portability:words -->\nb\n")
    assert lab_main(["matrix", "--pages", str(page)]) == 0
    assert page.read_text() == portability.update(page.read_text())
    assert "old" not in page.read_text()


def test_without_the_tests_of_the_repository_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(portability, "EVIDENCE", tmp_path / "portability.toml")
    evidence.cache_clear()
    assert lab_main(["matrix"]) == 2
    assert "in a clone of the repository" in capsys.readouterr().err
    evidence.cache_clear()
