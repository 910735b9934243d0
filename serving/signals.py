"""Signal handlers of a running server."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from functools import partial

_log = logging.getLogger(__name__)


class Signals:
    """SIGTERM and SIGINT (Ctrl-C) stop the server; SIGHUP makes it read its files again.

    Args:
      on_hangup: called at every SIGHUP.

    Attributes:
      stop: set by the first SIGTERM or SIGINT: the server drains.
      hurry: set by the second: the server ends open requests at once.
      exit_code: exit code after the second signal: 128 plus the signal's number, as after a kill.
    """

    def __init__(self, on_hangup: Callable[[], None]):
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.exit_code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, partial(self._stop, number))
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _stop(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.stop.set()
        elif not self.hurry.is_set():
            _log.warning("told to stop again (%s): ending open requests", number.name)
            self.exit_code = 128 + number
            self.hurry.set()
        else:
            os._exit(128 + number)
