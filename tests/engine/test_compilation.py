"""Programs that child processes compile onto disk: what is loaded, and children that fail."""

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.engine.device import compilation
from peagle_jax.engine.device.compilation import CompileError, Failure, compile_missing
from peagle_jax.method import step
from peagle_jax.method.verify import verify
from tests import tiny
from tests.waiting import LIMIT

CONFIG = EngineConfig(
    num_draft=2, max_num_seqs=1, max_model_len=64, page_size=4, greedy_rounds=False
)
PROMPT, PARAMS = [3, 4, 5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True)
STARTED = "TEST_COMPILATION_STARTED"
"""Names a file for the rules below, which children import from here."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Programs are kept here."""
    monkeypatch.setenv(STARTED, str(tmp_path / "started"))
    return tmp_path / "programs"


def dies_once(*operands, **rules):
    """The engine's rule; the first child that traces it is killed."""
    with contextlib.suppress(FileExistsError):
        Path(os.environ[STARTED]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return verify(*operands, **rules)


def dies(*operands, **rules):
    os.kill(os.getpid(), signal.SIGKILL)


def is_refused(*operands, **rules):
    raise NotImplementedError("this rule has\nno kernel")


def never_ends(*operands, **rules):
    Path(os.environ[STARTED]).write_text(str(os.getpid()))
    time.sleep(600)


for rule in (dies_once, dies, is_refused, never_ends):
    rule.program_key = rule.__name__


def engine(folder: Path | None, accept=verify) -> Engine:
    head, config = tiny.head(**tiny.HEAD_OF_ONE_LAYER), replace(CONFIG, programs_folder=folder)
    return Engine(tiny.target(**tiny.ONE_LAYER), head, config, accept=accept)


def refuse(*operands, **rules):
    raise AssertionError("this process traces a program")


@pytest.mark.slow
def test_the_engine_loads_what_children_compiled_although_one_died(folder, monkeypatch):
    expected = engine(None).generate([PROMPT], PARAMS)[0].tokens
    loading, reported, done = engine(folder, dies_once), [], []
    with monkeypatch.context() as patch:
        patch.setattr(step, "prefill", refuse)
        patch.setattr(step, "speculative_step", refuse)
        loading.compile_missing(report=reported.append, on_done=done.append)
        assert loading.missing_on_disk() == ()
        loading.warm_up()
    assert loading.generate([PROMPT], PARAMS)[0].tokens == expected
    assert len(done) == len(set(done)) == 3  # prefill, rounds, controls
    assert [progress.done for progress in reported] == [0, 1, 2, 3]
    assert {progress.total for progress in reported} == {3}
    loading.compile_missing(report=refuse)  # nothing is missing


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("accept", "reason"),
    [
        (is_refused, "NotImplementedError: this rule has no kernel"),
        (dies, "ended with signal SIGKILL, twice"),
    ],
)
def test_a_program_that_cannot_be_compiled_is_named(folder, accept, reason):
    with pytest.raises(CompileError, match=r"the program of .* cannot be compiled: .*") as caught:
        engine(folder, accept).compile_missing()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_full_disk_compiles_in_this_process(folder, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    loading = engine(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # of the children too
    try:
        loading.compile_missing()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"compiles in this process: it cannot be kept in {folder}" in caplog.text
    assert len(loading.generate([PROMPT], PARAMS)[0].tokens) == PARAMS.max_tokens


@pytest.mark.slow
def test_children_end_in_the_middle_of_a_program_once_they_must(folder):
    started = Path(os.environ[STARTED])
    begin = time.monotonic()
    engine(folder, never_ends).compile_missing(must_end=started.exists)
    assert time.monotonic() - begin < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def answers(monkeypatch, ask):
    """Children are this function of a job."""
    child = SimpleNamespace(ask=lambda job, must_end: ask(job), close=lambda: None)
    monkeypatch.setattr(compilation, "_Child", lambda setup, has_low_priority: child)


def test_equal_programs_that_children_list_compile_once(monkeypatch):
    """Of four engines two need the same programs, one cannot be made, and one lacks nothing."""
    listed, compiled, done, ready = [("prefill", "file 1"), ("controls", "file 2")], [], [], []

    def ask(job):
        if job.key is not None:
            compiled.append(job.key)
            return Failure("no kernel") if job.key == "controls" else None
        if job.recipe == 2:
            raise compilation._Died("a compiling process ended")
        return listed if job.recipe < 2 else []

    answers(monkeypatch, ask)
    call = dict(on_done=lambda *program: done.append(program), on_ready=ready.append)
    failed = compile_missing([list] * 4, [None] * 4, jobs=1, **call)
    assert compiled == ["prefill", "controls"]
    assert done == [(0, "prefill"), (1, "prefill")]
    assert ready == [2, 3, 0, 1]
    reasons = {program: failure.reason for program, failure in failed.items()}
    died = "a compiling process ended, twice"
    assert reasons == {(0, "controls"): "no kernel", (2, None): died}


def test_a_rule_that_no_process_can_get_compiles_in_this_one(folder, caplog):
    caplog.set_level("INFO")

    def local(*operands, **rules):
        return verify(*operands, **rules)

    local.program_key = "local"
    alone = engine(folder, local)
    alone.compile_missing(report=refuse)
    assert "programs compile in this process" in caplog.text
    assert len(alone.missing_on_disk()) == 3


AT_A_TERMINAL = """
import fcntl, os, termios
from peagle_jax.engine.device.compilation import _Child

fcntl.ioctl(2, termios.TIOCSCTTY, 0)
settings = termios.tcgetattr(2)
settings[3] |= termios.TOSTOP
termios.tcsetattr(2, termios.TCSANOW, settings)
child = _Child(b"no setup", has_low_priority=False)
_, status = os.waitpid(child._process.pid, os.WUNTRACED)
if os.WIFSTOPPED(status):
    child._process.kill()
    print("stopped by", os.WSTOPSIG(status))
else:
    print("exit code", os.waitstatus_to_exitcode(status))
"""
"""Starts a child that writes an error to a terminal which stops writers in the background."""


@pytest.mark.slow
def test_a_child_may_write_to_a_terminal_that_stops_writers_in_the_background():
    ours, terminal = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(terminal, "wb", buffering=0) as stderr:
        done = subprocess.run(
            [sys.executable, "-c", AT_A_TERMINAL],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.stdout == "exit code 1\n"
        stderr.close()  # with nothing to read, the next line fails then, and does not wait
        assert screen.read(1)
