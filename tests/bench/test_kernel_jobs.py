"""`peagle-bench kernels --jobs`: processes compile all specs first, then each is measured in turn."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import kernel_timing, kernels
from bench.kernel_jobs import Job, _Running, compile_job, measure_job, side_by_side
from pallas_kernels.rms_norm import specs
from peagle_jax.cli import runs
from tests.waiting import eventually


def note(job: Job, what: str) -> None:
    """Adds a line to the file that is named by the operation."""
    with Path(job.op).open("a") as file:
        file.write(f"{what} {job.spec}\n")


def wait_for(file: str) -> None:
    eventually(Path(file).exists)


def compile_(job: Job, turn) -> Iterator[bool]:
    note(job, "compile")
    if job.spec == "slow":
        time.sleep(3600)
    yield job.spec != "alone"


def measure(job: Job, turn) -> Iterator[dict]:
    if job.spec == "queued":  # it asks while "first" has its turn, and dies
        wait_for(job.op + ".begun")
        turn.parent.send(("ask", None))
        Path(job.op + ".dead").touch()
        os._exit(1)
    with turn:
        if job.spec == "bad":
            raise ValueError("too large\nand so on")
        if job.spec == "dead":
            os._exit(1)
        note(job, "begin")
        if job.spec == "first":
            Path(job.op + ".begun").touch()
            wait_for(job.op + ".dead")
        note(job, "end")
    yield {"spec": job.spec, "process": os.getpid(), "reference": job.reference}
    if job.spec == "half":
        raise ValueError("the second case")


@pytest.mark.exhaustive
def test_all_compile_before_one_is_measured_and_one_is_at_a_time(tmp_path, caplog):
    """Jobs that fail, die in their turn or compile forever leave the others alone, and what was measured stays."""
    file = str(tmp_path / "notes")
    names = ["a", "bad", "dead", "slow", "alone", "half"]
    jobs = [Job(file, name, False) for name in names]
    rows = list(side_by_side(jobs, 2, compile_, measure, seconds=30))
    found = {row["spec"]: row["reference"] for row in rows}
    assert found == {"a": True, "slow": False, "alone": False, "half": True}
    assert len({row["process"] for row in rows} | {os.getpid()}) == 5
    assert f"{file} slow: TimeoutError: not done in 30 s" in caplog.text
    assert f"{file} bad: RuntimeError: ValueError: too large" in caplog.text
    assert f"{file} half: RuntimeError: ValueError: the second case" in caplog.text
    assert f"{file} dead: RuntimeError: the process died" in caplog.text
    lines = Path(file).read_text().splitlines()
    assert sorted(lines[: len(names)]) == sorted(f"compile {name}" for name in names)
    measured = [line.split() for line in lines[len(names) :]]
    assert [what for what, _ in measured] == ["begin", "end"] * 4
    assert all(a[1] == b[1] for a, b in zip(measured[::2], measured[1::2], strict=True))


class Channel:
    """A connection whose other end is a job that died when it had asked for its turn."""

    def send(self, message):
        raise BrokenPipeError

    def recv(self):
        raise ConnectionResetError


def test_a_job_that_dies_before_its_turn_is_reported_like_others():
    one = _Running(Job("op", "spec", False), None, Channel(), since=None)
    one.give_turn()
    assert not one.is_late(60)
    what, error = one.receive()
    assert (what, str(error)) == ("end", "the process died")


@pytest.mark.slow
def test_a_job_that_dies_while_it_waits_for_its_turn_leaves_the_others_alone(tmp_path, caplog):
    file = str(tmp_path / "notes")
    jobs = [Job(file, name, False) for name in ("first", "queued", "last")]
    rows = list(side_by_side(jobs, 3, compile_, measure, seconds=300))
    assert {row["spec"] for row in rows} == {"first", "last"}
    assert "queued: RuntimeError: the process died" in caplog.text


def test_a_job_has_the_rows_of_its_cases(monkeypatch):
    kept = []
    monkeypatch.setattr(runs, "keep_compiled_programs", kept.append)
    monkeypatch.setattr(specs, "SPECS", {"small": specs.Spec(rows=2, width=256, parts=2)})
    monkeypatch.setattr(kernels, "_CALLS", (2, 2))
    monkeypatch.setattr(kernel_timing, "_SECONDS", 0)
    monkeypatch.setattr(kernel_timing, "_REPEATS", 1)
    job = Job("rms_norm", "small", False)
    assert list(compile_job(job, None)) == [True]
    (row,) = measure_job(job, contextlib.nullcontext())
    assert (row["op"], row["spec"], row["calls"]) == ("rms_norm", "small", 2)
    assert row["reference_us"] > 0
    (row,) = measure_job(job._replace(reference=False), contextlib.nullcontext())
    assert row["us"] > 0
    assert row["reference_us"] is None
    assert kept == [os.environ.get("XDG_CACHE_HOME")] * 3
