"""Output that nobody reads any more: `| head` ends a program with code 1 and not a word."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_FLIGHT = """
import sys
import jax
from peagle_jax.engine.device import transfer

step = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, x: (x @ x) % 7, x))
bits = step(jax.numpy.ones((300, 300), jax.numpy.int32)).ravel()
bits.block_until_ready()
bits = step(bits.reshape(300, 300)).ravel()
transfer.Result(bits, transfer.Layout(bits))
assert not bits.is_ready()
sys.exit(7)
"""


def test_an_exit_waits_for_the_calls_in_flight():
    """Their transfer to the host would call the interpreter that has gone, and abort."""
    done = subprocess.run(
        [sys.executable, "-c", IN_FLIGHT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")


COMMANDS = {
    "peagle-generate": "-m peagle_jax --model {target} --method none --no-cache --max-tokens 64 x",
    "peagle-convert": "-m convert plan {target}",
    "peagle-train": "-m peagle_jax.training plan --preset qwen3-0.6b",
    "python -m lab": "-m lab matrix",  # and peagle-bench
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_ends_with_its_reader(name, folders):
    reader, writer = os.pipe()
    os.close(reader)
    line = COMMANDS[name].format(target=folders.target).split()
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, *line],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr
