"""What a child process of the server owes its parent: it leaves signals to it, and does not outlive it."""

import ctypes
import logging
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def follow_parent() -> None:
    """Leaves signals of a terminal or a service manager, which reach all processes, to the first one.

    A child reads the end of its parent from a socket, and ends with a log line. Should it hang in a library meanwhile, the
    kernel ends it: when the parent dies it sends SIGUSR1, whose handler is C's `alarm` itself. The handler gets the
    signal's number, so SIGALRM follows as many seconds later, without Python.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A program that a child starts has the default again, which it would not have after SIG_IGN.
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        handler = ctypes.cast(library.alarm, ctypes.c_void_p)
        library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        library.signal.restype = ctypes.c_void_p
        library.signal(signal.SIGUSR1, handler)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)


def end_orphan() -> None:
    """Ends this process, whose parent is gone, with a log line and code 1."""
    _log.error("the first process of the server has ended, and the engine's process ends too")
    logging.shutdown()
    os._exit(1)
