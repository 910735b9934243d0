"""Memory of compiled constraints: what one takes, and what those of all open requests take in the
engine's process."""

import ctypes
import threading
import weakref
from collections import Counter, deque

_TOTAL = 512 << 20
"""Bytes of all of them; of one caller half. Most take 0.1 MB, those with thousands of names 5 to
16."""


class ConstraintsFull(RuntimeError):
    """Open requests hold as much memory with their constraints as they may; retry later."""


class Lease:
    """Memory of a compiled constraint. It is free again when this object is gone."""


class ConstraintMemory:
    """Counts what open requests hold. Thread-safe.

    Args:
      total: see `_TOTAL`.
    """

    def __init__(self, total: int = _TOTAL):
        self._total, self._lock = total, threading.Lock()
        self._held: Counter[str] = Counter()
        """Bytes by caller."""
        self._freed: deque[tuple[str, int]] = deque()
        """Leases that are gone. The collector of garbage may end one while this thread holds the
        lock, so their end takes no lock."""

    def lease(self, origin: str, size: int) -> Lease:
        """Takes `size` bytes for a caller, before its constraint is compiled.

        Raises:
          ConstraintsFull: not so many are left.
        """
        with self._lock:
            self._settle()
            if self._held[origin] + size > self._total // 2:
                raise ConstraintsFull(
                    "the constraints of this client's open requests take too much memory"
                )
            if self._held.total() + size > self._total:
                raise ConstraintsFull("the constraints of open requests take too much memory")
            self._held[origin] += size
        lease = Lease()
        weakref.finalize(lease, self._freed.append, (origin, size)).atexit = False
        return lease

    def _settle(self) -> None:
        while self._freed:
            origin, size = self._freed.popleft()
            self._held[origin] -= size
        self._held += Counter()  # drops callers that hold nothing


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split(" ")]


def allocated() -> int | None:
    """Bytes that this process has allocated and not freed; None if the C library does not say."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc
        return None
    count.restype = _Counts
    counts = count()
    return counts.uordblks + counts.hblkhd
