"""`python -m lab kernels` on a CPU, with small kernels in the interpreter."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import kernel_timing, kernels
from lab.__main__ import main
from lab.specs import moe as moe
from lab.specs import ops
from lab.specs import quantize as quantize
from lab.specs import rms_norm as specs
from pallas_kernels.device import B200, H200


def normal(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape).astype(dtype)


def timed(function, copies, **options) -> kernel_timing.Timing:
    return kernel_timing.Program(function, copies[0]).time(copies, **options)


@pytest.fixture
def small(monkeypatch):
    """One spec that the interpreter is quick with, in three calls."""
    one = {"small": specs.Spec(rows=2, width=256, parts=2)}
    monkeypatch.setattr(specs, "SPECS", one)
    monkeypatch.setattr(kernels, "_CALLS", (3, 3))
    monkeypatch.setattr(kernel_timing, "_SECONDS", 0)
    monkeypatch.setattr(kernel_timing, "_REPEATS", 1)


@pytest.mark.usefixtures("small")
def test_a_row_has_the_kernel_beside_its_reference():
    (case,) = kernels.cases("rms_norm")
    row = kernels.measure(case, "NVIDIA H200")
    assert row["bytes"] == 2 * 256 * (2 + 2 * 4 + 2 + 2) + 256 * 2
    assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["us"] * 1e6)
    assert row["fraction_of_bandwidth"] == pytest.approx(row["bytes_per_second"] / 4.3e12)
    assert row["speedup"] == pytest.approx(row["reference_us"] / row["us"])
    assert row["speedup"] < 1  # the reference is compiled, the kernel interpreted
    assert 0 <= row["max_relative_error"] < 2**-7
    assert row["calls"] == 3


def test_every_call_has_arguments_of_its_own():
    """Steps 1, 2 and 3 are added in turn to the result before, as to a cache written in place."""
    seen = []

    def add(h, step):
        jax.debug.callback(lambda h: seen.append(float(h[0, 0])), h, ordered=True)
        return h + step[:1]

    copies = [(jnp.zeros((2, 2)), jnp.full((3, 2), i + 1.0)) for i in range(3)]
    assert timed(add, copies).calls == 3
    jax.effects_barrier()
    assert seen[:6] == [0, 1, 3, 6, 7, 9]


def test_a_program_leaves_its_arguments():
    """One of the results is written in place, the other is not."""
    h, x = jnp.ones((2, 2)), jnp.ones((3, 2))
    program = kernel_timing.Program(lambda h, x: (x.sum(), h + 1), (h, x))
    for _ in range(2):
        total, updated = program(h, x)
        assert np.array_equal(updated, np.full((2, 2), 2))
        assert total == 6


def test_short_calls_are_timed_by_their_kernels(monkeypatch):
    """A trace of 6 calls of 1.5 us: three arguments twice."""
    monkeypatch.setattr(kernel_timing, "_TRACED_CALLS", 7)
    read = []

    def launches_of(path):
        read.append(path.name.endswith(".trace.json.gz"))
        return [{"dur": 3.0}] * 3, []

    monkeypatch.setattr(kernel_timing, "launches_of", launches_of)
    copies = [(jnp.full((2, 2), i),) for i in range(3)]
    timing = timed(lambda x: x + 1, copies, trace_below=10.0)
    assert (timing.seconds, timing.timed_by) == (pytest.approx(1.5e-6), "trace")
    assert read == [True]
    assert timed(lambda x: x + 1, copies).timed_by == "clock"


def test_several_results_replace_the_arguments_that_they_fit():
    """As queries and caches that are written in place; then a residual stream and its norm."""
    shapes = lambda *sizes: tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes)
    args = shapes((4, 8), (9,), (2, 16), (100, 8), (100, 8))
    assert kernel_timing._links(args, shapes((4, 2, 4), (100, 8), (100, 8), (7, 7))) == {
        0: 0,
        3: 1,
        4: 2,
    }
    assert kernel_timing._links(shapes((4, 8), (8,)), shapes((4, 8), (4, 8))) == {0: 1}


def test_random_arguments_are_real_numbers_and_zero_indices():
    shapes = (
        jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((5,), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    )
    values, indices, scale = kernels._random(shapes, jax.random.key(0))
    assert [x.dtype for x in (values, indices, scale)] == [x.dtype for x in shapes]
    assert not indices.any()
    assert np.std(np.asarray(values, np.float32)) == pytest.approx(1, rel=0.1)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("op", ops())
def test_every_spec_is_a_case(op):
    for case in kernels.cases(op):
        assert case.bytes > 0
        made = jax.eval_shape(case.inputs, jax.random.key(0))
        like = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert like(made) == like(case.shapes), case.spec


@pytest.mark.sampled(1, slow=1)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (quantize, quantize.Spec(rows=1, width=1024)),
        (moe, moe.Spec(kernel="plan", rows=5, experts=32, top_k=2)),
        (moe, moe.Spec(kernel="place", rows=70, experts=32, top_k=2)),
    ],
)
def test_padding_of_a_kernel_is_not_compared(module, spec, monkeypatch):
    monkeypatch.setattr(module, "SPECS", {"small": spec})
    (case,) = kernels.cases(module.__name__.rpartition(".")[2])
    assert kernels.measure(case, "NVIDIA H200")["max_relative_error"] < 1e-6


def test_without_a_gpu_it_says_so(capsys, tmp_path):
    assert main(["kernels", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "timed on an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_rows_are_printed_and_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "describe", lambda device: H200)
    out = tmp_path / "rows.jsonl"
    command = ["kernels", "--op", "rms_norm", "--out", str(out), "--sha", "abc", "--no-cache"]
    assert main(command) == 0
    assert "rms_norm small" in capsys.readouterr().out
    assert '"op": "rms_norm"' in out.read_text()
    assert main([*command, "--spec", "unknown"]) == 2
    assert "'unknown'" in capsys.readouterr().err


def test_specs_without_a_kernel_for_the_device_are_skipped_in_one_line(
    caplog, tmp_path, monkeypatch
):
    """A chip that has the kernel of one spec of an operation and lacks that of two others."""
    here, others = (B200.sm,), (H200.sm,)
    shown = {
        "here": SimpleNamespace(chips=here),
        "away-1": SimpleNamespace(chips=others),
        "away-2": SimpleNamespace(chips=others),
    }
    monkeypatch.setattr(moe, "SPECS", shown)
    monkeypatch.setattr(kernels, "describe", lambda device: B200)
    timed = []
    monkeypatch.setattr(kernels, "cases", lambda op, names: timed.extend(names) or ())
    command = ["kernels", "--op", "moe", "--out", str(tmp_path / "rows.jsonl"), "--no-cache"]
    assert main(command) == 0
    assert timed == ["here"]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "lab.kernels"]
    assert line == "moe has no kernel for NVIDIA B200: away-1, away-2 skipped"
