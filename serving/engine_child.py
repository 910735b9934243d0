"""Starts the process of the engine, and ends it.

    peagle-serve (serves clients) -- socket -- engine process

The child is a new interpreter (nothing is forked), inherits its end of a socket without a name, and
ends when its parent does.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peagle_jax.text import child_python

if TYPE_CHECKING:
    from peagle_jax import Engine
    from serving.settings import Settings

_log = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds after its round in which the engine's process ends."""

DEFAULT = "serving.engines", "make_engine"
"""Module and name of the function that makes the engine of model folders."""


@dataclass(frozen=True)
class Begin:
    """The first message to the engine's process.

    Args:
      make_engine: module and name of a function that makes the engine of the settings.
      cache_home: the user's cache folder; None is `~/.cache`.
    """

    settings: "Settings"
    make_engine: tuple[str, str]
    cache_home: str | None


def function_name(function: "Callable[[Settings], Engine]") -> tuple[str, str]:
    """Module and name of a function at the top level of a module, by which another process finds
    it.
    """
    module = function.__module__
    if module == "__main__":
        spec = sys.modules["__main__"].__spec__
        if spec is None:
            raise ValueError(f"{function.__qualname__} belongs to a script: move it to a module")
        module = spec.name
    return module, function.__qualname__


class EngineChild:
    """The process of the engine. It starts at once, and imports jax while the options are read.

    Attributes:
      socket: this end of the socket to it.
    """

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_python.command("serving.engine_process", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=child_python.environment(),
                stdin=subprocess.DEVNULL,
            )
        self._last_end: threading.Timer | None = None

    def begin(self, begin: Begin) -> None:
        """Tells it what to serve."""
        from serving.frames import encode  # numpy, which --help and mistakes do not need

        self.socket.sendall(encode(("begin", begin)))

    def how_it_ended(self) -> str:
        """Its end in words; waits a moment for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5.0)
            return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "nothing known: it still runs"

    @property
    def code(self) -> int:
        """The exit code of the server after the engine's process has ended by itself: its own, if
        it has one.
        """
        code = self._process.poll()
        return code if code is not None and code > 0 else 1

    def stop(self, timeout: float, code: int, send: Callable[[tuple], None]) -> bool:
        """Ends it.

        Args:
          timeout: seconds for its round.
          code: the exit code of the service.
          send: sends a message to it.

        Returns:
          Whether it ended by itself.
        """
        with contextlib.suppress(OSError):
            send(("stop", timeout, code))
        return self.end(timeout + _GRACE)

    def end(self, seconds: float) -> bool:
        """Waits at most so many seconds until it has ended, and kills it then; returns whether it
        ended by itself.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def end_within(self, seconds: float) -> None:
        """Ends both processes with code 1, unless this one has ended by itself until then.

        It helps against a thread that hangs, in a library or in a write: an interpreter that exits
        waits for it.
        """

        def end() -> None:
            _log.error("the server did not end by itself: its processes are killed")
            self.end(0.0)
            logging.shutdown()
            os._exit(1)

        self._last_end = threading.Timer(seconds, end)
        self._last_end.daemon = True
        self._last_end.start()

    def keep_this_process(self) -> None:
        """Takes `end_within` back: for a process that goes on."""
        if self._last_end is not None:
            self._last_end.cancel()
