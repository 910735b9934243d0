"""The suite may run where SIGINT is ignored, as in jobs of scripts: children still take it."""

import subprocess
import sys
from pathlib import Path

_CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
_SUITE = f"""
import subprocess, sys
import tests.suite
subprocess.run([sys.executable, "-c", {_CHILD!r}], check=True)
"""


def test_children_of_a_suite_that_ignores_sigint_can_be_interrupted():
    ignoring = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash", sys.executable, "-c"]
    run = lambda code: subprocess.run(
        [*ignoring, code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert run(_CHILD).stdout == "False\n"  # as without the suite
    assert run(_SUITE).stdout == "True\n"
