"""A clock for time limits that neither a stopped process (SIGSTOP) nor a paused machine may exceed."""

import threading
import time
from collections.abc import Callable

_LONGEST = 1.5
"""Seconds between two readings that count; a process that runs reads the clock every second."""


class RunClock:
    """Seconds that this process has run since the clock was made. Any thread may read it; one must, every second.

    Args:
      clock: a clock that goes on while the process does not run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._seconds, self._read = 0.0, clock()

    def now(self) -> float:
        """The time."""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._read, _LONGEST)
            self._read = now
            return self._seconds
