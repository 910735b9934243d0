"""Memory of processes that serve: glibc keeps what was freed in small pieces, so it is returned
after large requests.

A full collection of cyclic garbage walks all objects, and holds the lock of the interpreter
meanwhile: hundreds of thousands of them, and seconds, once programs have been traced or loaded.
Those stay for good, so the collector leaves them out. What requests make is freed by counting
references; little is left to collect.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

LARGE = 100_000
"""Bytes or characters of a request that is followed by a trim."""
_SECONDS = 1.0


def c_library_trim() -> None:
    """Returns free pages to the system; does nothing where the C library has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryReturn:
    """Trims the heap one second after a large request, once for all large requests of that second.

    Args:
      trim: called in a thread, without Python's global lock.
    """

    def __init__(self, trim: Callable[[], None] = c_library_trim):
        self._trim = trim
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, size: int) -> None:
        """Schedules a trim after a large request. Call it in the event loop.

        Args:
          size: bytes or characters of the request.
        """
        if size >= LARGE and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._start)

    def close(self) -> None:
        """Cancels the scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._trim)


_THRESHOLDS = (5_000, 20, 20)
"""Objects made since the last collection of the youngest, and collections of one generation for one
of the next.
"""


def pause_collector() -> None:
    """Collects nothing until `settle_heap`: while a process starts, nearly all that is
    made stays.
    """
    gc.disable()


def settle_heap(*, collects: bool = True) -> None:
    """Leaves all objects that exist out of later collections.

    Args:
      collects: whether to collect once before, and to return free memory to the system: a second,
        before requests come.
    """
    if collects:
        gc.collect()
        c_library_trim()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
