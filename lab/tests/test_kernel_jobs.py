"""`python -m lab kernels --jobs`: all specs are compiled, then each is measured in turn."""

import contextlib
import os
from pathlib import Path

import pytest

from lab import kernel_timing, kernels
from lab.kernel_jobs import Job, side_by_side
from lab.kernels import compile_job, measure_job
from lab.specs import rms_norm as specs
from lab.tests.noted_jobs import compile_, measure
from peagle_jax.cli import runs


@pytest.mark.slow
def test_all_compile_before_one_is_measured_and_one_is_at_a_time(tmp_path, caplog):
    """Jobs that fail, die in their turn or compile forever leave the others alone."""
    file = str(tmp_path / "notes")
    names = ["a", "bad", "dead", "slow", "alone"]
    jobs = [Job(file, name) for name in names]
    rows = list(side_by_side(jobs, 2, compile_, measure, seconds=3))
    found = {row["spec"]: row["reference"] for row in rows}
    assert found == {"a": True, "slow": False, "alone": False}
    assert len({row["process"] for row in rows} | {os.getpid()}) == 4
    assert f"{file} slow: RuntimeError: died, or not done in 3 s" in caplog.text
    assert f"{file} slow: measured without its reference" in caplog.text
    assert f"{file} bad: RuntimeError: ValueError: too large" in caplog.text
    assert f"{file} dead: RuntimeError: died" in caplog.text
    lines = Path(file).read_text().splitlines()
    assert sorted(lines[: len(names)]) == sorted(f"compile {name}" for name in names)
    measured = [line.split() for line in lines[len(names) :]]
    assert [what for what, _ in measured] == ["begin", "end"] * 3
    assert all(a[1] == b[1] for a, b in zip(measured[::2], measured[1::2], strict=True))


def test_a_job_has_the_rows_of_its_cases(monkeypatch):
    kept = []
    monkeypatch.setattr(runs, "keep_compiled_programs", kept.append)
    monkeypatch.setattr(specs, "SPECS", {"small": specs.Spec(rows=2, width=256, parts=2)})
    monkeypatch.setattr(kernels, "_CALLS", (2, 2))
    monkeypatch.setattr(kernel_timing, "_SECONDS", 0)
    monkeypatch.setattr(kernel_timing, "_REPEATS", 1)
    job = Job("rms_norm", "small")
    assert compile_job(job, None) is True
    (row,) = measure_job(job, contextlib.nullcontext())
    assert (row["op"], row["spec"], row["calls"]) == ("rms_norm", "small", 2)
    assert row["reference_us"] > 0
    (row,) = measure_job(job._replace(reference=False), contextlib.nullcontext())
    assert row["us"] > 0
    assert row["reference_us"] is None
    assert kept == [os.environ.get("XDG_CACHE_HOME")] * 3
