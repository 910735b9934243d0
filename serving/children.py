"""Starts the other processes of a server, and ends them.

    peagle-serve (serves clients, process 0) --+-- socket -- engine process -- sockets -- API process 1, 2, ..
                                               +-- socket: orders -- API process 1, 2, ..

Every child is a new interpreter (nothing is forked), inherits its end of sockets without a name, and ends when its parent does.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
    """Module and name of a function at the top level of a module, by which another process finds it."""
    module = function.__module__
    if module == "__main__":
        spec = sys.modules["__main__"].__spec__
        if spec is None:
            raise ValueError(f"{function.__qualname__} belongs to a script: move it to a module")
        module = spec.name
    return module, function.__qualname__


def how_it_ended(process: subprocess.Popen) -> str:
    """The end of a process in words; waits a moment for it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(5.0)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "nothing known: it still runs"


class Children:
    """The other processes of a server. The engine's starts at once, and imports jax while its options are read.

    Attributes:
      engine: this process' end of the socket to the engine's process.
      controls: the ends of the sockets to the other servers, from process 1 on.
    """

    def __init__(self):
        self.engine, theirs = socket.socketpair()
        self._engine_process = _start("serving.engine_process", [theirs])
        theirs.close()
        self.controls: list[socket.socket] = []
        self.servers: list[subprocess.Popen] = []
        self._last_end: threading.Timer | None = None

    def begin(self, begin: Begin) -> None:
        """Tells the engine's process what to serve, and starts the other servers."""
        from serving.frames import encode  # numpy, which --help and mistakes do not need

        pairs = [socket.socketpair() for _ in range(1, begin.settings.num_servers)]
        socket.send_fds(self.engine, [b"\0"], [one.fileno() for one, _ in pairs])
        self.engine.sendall(encode(("begin", begin)))
        for index, (of_hub, of_server) in enumerate(pairs, start=1):
            ours, theirs = socket.socketpair()
            ends = [of_server, theirs]
            self.servers.append(_start("serving.api_process", ends, str(index)))
            self.controls.append(ours)
            for one in (of_hub, *ends):
                one.close()

    def how_the_engine_ended(self) -> str:
        """How the engine's process ended, in words."""
        return how_it_ended(self._engine_process)

    def how_a_server_ended(self, index: int) -> str:
        """How a process that serves clients ended, in words; `index` counts from 1."""
        return how_it_ended(self.servers[index - 1])

    @property
    def engine_code(self) -> int:
        """The exit code of the server after the engine's process has ended by itself: its own, if it has one."""
        code = self._engine_process.poll()
        return code if code is not None and code > 0 else 1

    def end_engine(self, timeout: float, code: int, send: Callable[[tuple], None]) -> bool:
        """Ends the engine's process.

        Args:
          timeout: seconds for its round.
          code: the exit code of the service.
          send: sends a message to it.

        Returns:
          Whether it ended by itself.
        """
        with contextlib.suppress(OSError):
            send(("stop", timeout, code))
        try:
            self._engine_process.wait(timeout + _GRACE)
        except subprocess.TimeoutExpired:
            self._engine_process.kill()
            self._engine_process.wait()
            return False
        return True

    def end_within(self, seconds: float) -> None:
        """Ends all processes with code 1, this one too, unless it has ended by itself until then.

        It helps against a thread that hangs, in a library or in a write: an interpreter that exits waits for it.
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

    def end(self, seconds: float) -> None:
        """Waits at most so many seconds until all have ended, and kills the rest."""
        until = time.monotonic() + seconds
        for one in (*self.servers, self._engine_process):
            try:
                one.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _start(module: str, sockets: Sequence[socket.socket], *arguments: str) -> subprocess.Popen:
    numbers = [one.fileno() for one in sockets]
    return subprocess.Popen(
        child_python.command(module, *map(str, numbers), *arguments),
        pass_fds=numbers,
        env=child_python.environment(),
        stdin=subprocess.DEVNULL,
    )
