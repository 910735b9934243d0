"""A test that hangs or a worker that dies ends the run, and the output names the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = """
import pytest

@pytest.mark.parametrize("i", range(5))
def test_other(i):
    pass
"""
HANGS = """
import threading
import pytest

def test_before():
    pass

@pytest.mark.timeout(2)
def test_hangs():
    threading.Event().wait()

def test_after():
    pass
"""
DIES = HANGS.replace("threading.Event().wait()", "__import__('os')._exit(1)")


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "stacks"), [(HANGS, 1), (DIES, 0)], ids=["a hang", "a death"])
def test_a_run_ends_and_names_the_test_that_hangs_or_dies(tests, stacks, tmp_path):
    Path(tmp_path, "conftest.py").write_text("from tests.suite import pytest_configure\n")
    Path(tmp_path, "test_a.py").write_text(tests)
    for name in "bcdef":
        Path(tmp_path, f"test_{name}.py").write_text(OTHERS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", "."]
    command += ["-n", "2", "--dist", "loadfile", "-p", "xdist", "-p", "pytest_timeout", "."]
    command += ["-o", f"faulthandler_timeout={stacks}"]  # 0 is none
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]  # this test may run in a worker itself
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 1, output
    assert "crashed while running 'test_a.py::test_hangs'" in output
    assert ("in test_hangs" in output) == bool(stacks)
