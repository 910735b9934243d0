"""The process of the engine: it holds jax, the weights, the scheduler and the pages, and talks to
no client.

    python -m serving.engine_process DESCRIPTOR

The descriptor is a socket to the first process of the server; `engine_child` starts this one. It
imports jax while the first process reads options and files. Then it gets what to serve.
"""

import logging
import os
import socket
import sys
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from peagle_jax.config import ConfigError
from serving.engine_child import DEFAULT, Begin
from serving.hub import Hub
from serving.logs import configure
from serving.memory import pause_collector, settle_heap
from serving.settings import Settings
from serving.worker import EngineWorker, ProgressLog

if TYPE_CHECKING:
    from peagle_jax import Engine
import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def follow_parent() -> None:
    """Leaves signals of a terminal or a service manager, which reach all processes, to the first
    one.

    A child reads the end of its parent from a socket, and ends with a log line. Should it hang in a
    library meanwhile, the kernel ends it: when the parent dies it sends SIGUSR1, whose handler is
    C's `alarm` itself. The handler gets the signal's number, so SIGALRM follows as many seconds
    later, without Python.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A program that a child starts has the default again, which it would not have after
        # SIG_IGN.
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


def compile_only(begin: Begin) -> int:
    """Puts the programs of the settings, and the times of rounds, on disk; returns the exit code.

    Raises:
      ConfigError: programs are not kept on disk here; or as `make_engine`.
    """
    engine = _make_engine(begin)
    engine.compile_missing(report=ProgressLog())
    missing = engine.missing_on_disk()
    if missing is None:
        raise ConfigError("programs are not kept on disk here: the log says why")
    if missing:
        raise ConfigError(f"{len(missing)} programs are not on disk: the log says why")
    engine.warm_up()
    _say(f"{engine.programs.num_compiled} programs are in {engine.programs.folder}")
    return 0


def waits_for_all(settings: Settings) -> bool:
    """Whether the server serves once all programs are loaded, see `Settings.ready`."""
    from peagle_jax.cli import runs

    return settings.ready == "all" or (settings.ready is None and runs.compiles_in_children())


def _make_engine(begin: Begin) -> "Engine":
    from peagle_jax.cli import runs

    settings = begin.settings
    configure(settings.log_level)
    if not settings.no_cache:
        folder = runs.keep_compiled_programs(begin.cache_home)
        settings = replace(settings, programs_folder=folder)
    module, name = begin.make_engine
    return getattr(import_module(module), name)(settings)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Process:
    """The engine's process, from its first message to its end."""

    def __init__(self, connection: socket.socket):
        self._hub = Hub(connection, on_lost=end_orphan)

    def run(self) -> int:
        """Serves until the first process ends it; returns the exit code."""
        _, begin = self._hub.orders.get()
        try:
            worker = self._start(begin)
        except Exception as error:
            # XLA has no type of its own for a lack of memory.
            is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
            if not is_memory and not isinstance(error, ConfigError | OSError):
                raise
            self._hub.send("refused", " ".join(str(error).split()))
            return 2
        _, timeout, code = self._hub.orders.get()
        worker.stop(timeout)
        # Without the interpreter's own end: it aborts while a thread compiles, waits for a device,
        # or belongs to a library that unloads, and the memory of a device takes it seconds.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)

    def _start(self, begin: Begin) -> EngineWorker:
        engine = _make_engine(begin)
        worker = EngineWorker(
            engine, waits_for_all=waits_for_all(begin.settings), before_ready=settle_heap
        )
        self._hub.describe(worker)
        return worker


def main() -> int:
    """Runs the process of the engine; returns the exit code."""
    follow_parent()
    pause_collector()
    first = socket.socket(fileno=int(sys.argv[1]))
    import_module(DEFAULT[0])
    if not first.recv(1, socket.MSG_PEEK):
        return 1  # the first process has said why it serves nothing
    return _Process(first).run()


if __name__ == "__main__":
    sys.exit(main())
