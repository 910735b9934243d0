"""Programs of a model run without network, files and processes, and their verdict is right."""

import os
import socket

import pytest

from lab import sandbox
from peagle_jax import ConfigError

HARMFUL = {
    "connects": "import socket; socket.create_connection(('127.0.0.1', PORT))",
    "listens": "import socket; socket.socket().bind(('127.0.0.1', 0))",
    "starts a command": "import subprocess; subprocess.run(['true'], check=True)",
    "forks": "import os; os.fork()",
    "starts a thread": "import threading; threading.Thread(target=print).start()",
    "writes a file": "open('FOLDER/new', 'w').write('x' * 100_000)",
    "appends to a file": "f = open('FOLDER/old', 'a'); f.write('x'); f.flush()",
    "empties a file": "import os; os.truncate('FOLDER/old', 0)",
    "deletes a file": "import os; os.unlink('FOLDER/old')",
    "renames a file": "import os; os.rename('FOLDER/old', 'FOLDER/new')",
    "makes a folder": "import os; os.mkdir('FOLDER/new')",
    "opens the modes": "import os; os.chmod('FOLDER/old', 0o777)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "raises the limit": "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (99, 99)); "
    "open('FOLDER/old', 'a').write('x' * 9999)",
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_harm_is_prevented(kind, tmp_path):
    old = tmp_path / "old"
    old.write_text("kept")
    mode = old.stat().st_mode
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = HARMFUL[kind].replace("FOLDER", str(tmp_path))
        outcome = sandbox.run(program.replace("PORT", str(listener.getsockname()[1])))
    assert outcome.status in ("failed", "ended")
    assert old.read_text() == "kept"
    assert old.stat().st_mode == mode
    assert not (tmp_path / "new").is_dir()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == len("kept")


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("x = sum(range(10)); assert x == 45", "passed", ""),
        ("import math, re, typing, collections, itertools, hashlib, heapq, copy", "passed", ""),
        ("print('x' * 10**6); import sys; sys.stderr.write('y')", "passed", ""),
        ("assert 1 == 2, 'no'", "failed", "AssertionError: no"),
        ("def f(:", "failed", "SyntaxError"),
        ("exit(0)", "failed", ""),
        ("import sys; sys.exit(0)", "failed", "SystemExit"),
        ("input()", "failed", "EOFError"),
        ("f = lambda: f(); f()", "failed", "RecursionError"),
        ("x = 'y' * (1 << 40)", "failed", "MemoryError"),
        pytest.param("while True: pass", "ended", "", marks=pytest.mark.slow),
        ("import os; os._exit(0)", "ended", "exit code 0"),
        ("import os; os.abort()", "ended", "SIG"),
        ("\ud800", "failed", ""),
    ],
)
def test_every_end_has_its_verdict(program, status, detail):
    outcome = sandbox.run(program, seconds=2)
    assert outcome.status == status, outcome
    assert detail in outcome.detail


def test_no_variable_of_the_environment_is_seen(monkeypatch):
    monkeypatch.setitem(os.environ, "SECRET", "1")
    assert sandbox.run("import os; assert 'SECRET' not in os.environ").status == "passed"


def test_what_sleeps_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "_SLACK", 0.0)
    outcome = sandbox.run("import time; time.sleep(3600)", seconds=1)
    assert outcome.status == "ended"


def test_a_machine_that_cannot_confine_programs_runs_none(monkeypatch):
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="x86-64 or aarch64"):
        sandbox.run("pass")
