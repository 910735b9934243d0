"""Runs programs that a model wrote: no network, no files, no processes, limited time and memory.

The limits protect this machine from mistakes, and from harmful code in the training data of the
model. They do not detect a program that cheats its tests.
"""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab import sandbox_child
from peagle_jax import ConfigError

_CHILD = Path(sandbox_child.__file__)
_MOST_BYTES = 4096  # of a verdict
_SLACK = 60.0  # wall seconds beyond the processor seconds: programs share processors


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
      status: "passed", "failed" (an exception, SystemExit included) or "ended" (time or memory ran
        out, or the process died).
      detail: the last line of its error, or the signal.
    """

    status: str
    detail: str = ""


def check_supported() -> None:
    """Raises `ConfigError` where programs cannot be confined."""
    if sys.platform != "linux" or platform.machine() not in sandbox_child.ARCHITECTURES:
        raise ConfigError(
            "programs are confined on Linux on x86-64 or aarch64 only; use such a machine"
        )


def run(program: str, *, seconds: int = 5, memory: int = 1 << 30) -> Outcome:
    """Runs Python source in an interpreter of its own.

    Args:
      seconds: of processor time; it gets 60 more by the clock.
      memory: bytes of address space.

    Raises:
      ConfigError: this machine cannot confine it.
    """
    check_supported()
    reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", _CHILD, str(writer), str(seconds), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                cwd=folder,
                env={},
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds + _SLACK)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome("ended", "no end after the time limit")
        said = os.read(reader, _MOST_BYTES)
    if said:
        with contextlib.suppress(ValueError):
            return Outcome(*json.loads(said))
    code = process.returncode
    return Outcome("ended", signal.Signals(-code).name if code < 0 else f"exit code {code}")
