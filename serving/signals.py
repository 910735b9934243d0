"""Signal handlers of a running server."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

_log = logging.getLogger(__name__)


def exit_while_loading() -> None:
    """SIGTERM and SIGINT end the process at once, with 128 plus the signal's number, until
    `Signals` runs.

    Process 1 of a container ignores a signal without a handler. The handler raises no exception: an
    import or a callback may swallow it, and CPython ends the process by SIGINT where a
    KeyboardInterrupt leaves `exec` of a string (each dataclass runs one), also if it is caught.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_at_once)


def exit_at_once(number: int, _: FrameType | None = None) -> None:
    """Ends the process with 128 plus the signal's number."""
    os._exit(128 + number)


class Signals:
    """SIGTERM and SIGINT (Ctrl-C) stop the server; SIGHUP makes it read its files again.

    Args:
      on_hangup: called at every SIGHUP.

    Attributes:
      stop: set by the first SIGTERM or SIGINT: the server drains.
      hurry: set by the second: the server ends open requests at once.
      exit_code: exit code after the second signal: 128 plus the signal's number, as after a kill.
      failure: exit code if another process of the server is gone, see `fail`; None if none is.
    """

    def __init__(self, on_hangup: Callable[[], None]):
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.exit_code = 0
        self.failure: int | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, partial(self._stop, number))
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def fail(self, reason: str, code: int) -> None:
        """Ends the server, which has lost another process, without waiting for open requests."""
        if not self.stop.is_set():
            _log.error("%s; the server ends", reason)
            self.failure = code
            self.stop.set()

    def _stop(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.stop.set()
        elif not self.hurry.is_set():
            _log.warning("a second signal (%s): ending open requests", number.name)
            self.exit_code = 128 + number
            self.hurry.set()
        else:
            exit_at_once(number)
