"""A run that is killed leaves no output folder under the final name, and the next run continues it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from convert.partial import JOURNAL
from convert.synthetic import write_synthetic
from tests.convert.conftest import ROOT, TINY_MOE, same_files
from tests.waiting import LIMIT, eventually

NUM_LAYERS = 24


@pytest.fixture(scope="module")
def src(tmp_path_factory) -> Path:
    """Some hundred parameters; in groups of one layer a conversion takes seconds."""
    folder = tmp_path_factory.mktemp("resume") / "src"
    config = replace(TINY_MOE, num_layers=NUM_LAYERS)
    write_synthetic(folder, config, quantization="fp8", shard_bytes=3_000_000)
    return folder


def command(src: Path, dst: Path) -> list[str]:
    return [sys.executable, "-m", "convert", "convert", str(src), str(dst), "--group-size", "900KB"]


def groups_done(dst: Path) -> list[str]:
    journal = dst.with_name(dst.name + ".partial") / JOURNAL
    if not journal.exists():
        return []
    lines = journal.read_bytes().split(b"\n")[1:-1]  # the first says what is made, the last is torn
    return [json.loads(line)["group"] for line in lines]


STOPPED = """
import os, sys
from convert.__main__ import main
from convert.partial import Partial

count, number, *argv = sys.argv[1:]
record = Partial.record

def record_and_stop(self, entry):
    record(self, entry)
    if len(self.done) == int(count):
        os.kill(os.getpid(), int(number))

Partial.record = record_and_stop
sys.exit(main(argv))
"""
"""A conversion that sends itself a signal once it has finished `count` groups."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_is_gone_on_with(number, src, cli, tmp_path):
    dst = tmp_path / "dst"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for count in (2, 7):
        stopped = [sys.executable, "-c", STOPPED, str(count), str(int(number))]
        with subprocess.Popen([*stopped, *command(src, dst)[3:]], cwd=ROOT, **pipes) as process:
            _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        if number == signal.SIGINT:
            assert err == "\ninterrupted; give the same command again to go on\n"
        assert not dst.exists()
    before = set(groups_done(dst))
    assert len(before) >= 7
    kept = {path: os.stat(path).st_mtime_ns for path in files(dst.with_name("dst.partial"), before)}
    code, out, _ = cli(*command(src, dst)[3:])
    assert code == 0
    assert f"{len(before)} of them made before" in out
    for path, mtime in kept.items():  # not written again
        here = dst / path.relative_to(dst.with_name("dst.partial"))
        assert here.stat().st_mtime_ns == mtime
    assert not (dst / JOURNAL).exists()
    assert not dst.with_name("dst.partial").exists()
    assert cli("verify", src, dst, "--no-logits")[0] == 0
    assert cli("export", dst, tmp_path / "back")[0] == 0
    assert same_files(src, tmp_path / "back")


def files(partial: Path, groups: set[str]) -> list[Path]:
    return [path for name in groups for path in (partial / "weights" / name).rglob("*.0")]


@pytest.mark.slow
def test_the_second_of_two_runs_at_once_is_refused(src, cli, tmp_path):
    dst = tmp_path / "dst"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command(src, dst), cwd=ROOT, **pipes) as process:
        eventually(lambda: process.poll() is not None or groups_done(dst))
        process.send_signal(signal.SIGSTOP)  # it keeps its lock
        code, _, err = cli(*command(src, dst)[3:])
        process.send_signal(signal.SIGCONT)
        assert code == 2
        assert "another run" in err
        process.communicate(timeout=LIMIT)
        assert process.returncode == 0
    assert cli("verify", src, dst, "--no-logits")[0] == 0
