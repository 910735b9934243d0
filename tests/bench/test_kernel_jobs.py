"""`peagle-bench kernels --jobs`: processes compile all specs first, then each is measured in turn."""

import os
import threading
from pathlib import Path

import pytest

from bench import kernel_timing, kernels
from bench.kernel_jobs import measure_job, side_by_side
from pallas_kernels.rms_norm import specs
from peagle_jax import runs


def note(job, turn) -> list[dict]:
    """A job that notes what it does in a file named by its operation. Spec "bad" fails, when it is measured."""
    op, spec, _ = job
    if turn is None:
        with Path(op).open("a") as file:
            file.write(f"compile {spec}\n")
        return []
    if spec == "bad":
        raise ValueError("too large\nand so on")
    with turn:
        for what in ("begin", "end"):
            with Path(op).open("a") as file:
                file.write(f"{what} {spec}\n")
    return [{"spec": spec, "process": os.getpid()}]


@pytest.mark.slow
def test_all_compile_before_one_is_measured_and_one_is_at_a_time(tmp_path, caplog):
    file = str(tmp_path / "notes")
    names = ["a", "bad", "b", "c"]
    rows = list(side_by_side([(file, name, False) for name in names], 2, note))
    assert sorted(row["spec"] for row in rows) == ["a", "b", "c"]
    assert len({row["process"] for row in rows} | {os.getpid()}) == 4
    assert f"{file} bad: ValueError: too large" in caplog.text
    lines = Path(file).read_text().splitlines()
    assert sorted(lines[:4]) == sorted(f"compile {name}" for name in names)
    measured = [line.split() for line in lines[4:]]
    assert [what for what, _ in measured] == ["begin", "end"] * 3
    assert all(a[1] == b[1] for a, b in zip(measured[::2], measured[1::2], strict=True))


def test_a_job_has_the_rows_of_its_cases(monkeypatch):
    kept = []
    monkeypatch.setattr(runs, "keep_compiled_programs", kept.append)
    monkeypatch.setattr(specs, "SPECS", {"small": specs.Spec(rows=2, width=256, parts=2)})
    monkeypatch.setattr(kernels, "_CALLS", (2, 2))
    monkeypatch.setattr(kernel_timing, "_SECONDS", 0)
    monkeypatch.setattr(kernel_timing, "_REPEATS", 1)
    job = "rms_norm", "small", False
    assert measure_job(job, None) == []
    (row,) = measure_job(job, threading.Lock())
    assert (row["op"], row["spec"], row["calls"]) == ("rms_norm", "small", 2)
    assert kept == [os.environ.get("XDG_CACHE_HOME")] * 2
