"""A server on several hosts: its processes compare their settings before they start, and end together.

No gRPC and no jax here: `rpc/leader.py` and `rpc/follower.py` connect the processes.
"""

import ctypes
import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from peagle_jax.cli.model_folders import embedded
from serving.run_clock import RunClock
from serving.settings import Settings, engine_config
from serving.version import VERSION

FAILED, REFUSED, LOST, HUNG = 1, 2, 70, 71
"""Exit codes: this process failed; its options, weights or devices do not fit; another process ended; one is
silent, or a round has no result."""

BEATS = 4
"""Messages that a process sends within `Heartbeats.seconds`."""

_BLAME_SECONDS = 3.0
"""A collective fails at once where a process is lost. The stream of that process breaks at most this much later."""

_PIECES, _PIECE = 64, 1 << 16  # of each file of weights: their number, and bytes of one
_ROOT = Path(__file__).parents[1]
_CODE = ("pallas_kernels", "peagle_jax", "serving")

_log = logging.getLogger(__name__)


def identity(settings: Settings) -> dict[str, str]:
    """Values that must be equal on all hosts, by name.

    Raises:
      ConfigError: sizes that no engine can have.
      OSError: a folder that cannot be read.
    """
    sizes = asdict(engine_config(settings, settings.dtype))
    others = ("method", "quantization", "kv_cache_memory", "num_hosts")
    given = sizes | {name: getattr(settings, name) for name in others}
    head = Path(settings.drafter) if settings.drafter else None
    if head is None and settings.model is None and settings.method != "none":
        head = embedded(settings.method or "peagle")
    folders = {"target": Path(settings.model or embedded("target")), "drafter": head}
    return {
        "version": VERSION,
        "code": _digest(_ROOT, (path for name in _CODE for path in (_ROOT / name).rglob("*.py"))),
        **{name: version(name) for name in ("jax", "jaxlib")},
        **{name: str(value) for name, value in given.items()},
        **{
            f"files of the {name}": _digest(folder, _files(folder)) if folder else "none"
            for name, folder in folders.items()
        },
    }


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first thing that differs, in words: "num_draft is 3 there and 7 here"; None if all is equal."""
    for name in mine | theirs:
        here, there = mine.get(name), theirs.get(name)
        if here != there:
            return f"{name} is {there} there and {here} here"
    return None


def _files(folder: Path) -> list[Path]:
    # Notes beside the weights and hidden files of a download change nothing.
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)
    return [path for path in paths if not hidden(path)]


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    """A digest of names, sizes and evenly spread pieces of files: of those up to 4 MiB of all bytes."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        size = path.stat().st_size
        digest.update(f"{name} {size} ".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(max(piece * _PIECE, (size - _PIECE) * piece // (_PIECES - 1)))
                digest.update(file.read(_PIECE))
                if file.tell() >= size:
                    break
    return digest.hexdigest()[:16]


class Fate:
    """Ends this process once, whichever thread finds a reason first.

    Args:
      host: number of this host.
      leave: ends the process with an exit code; it does not return.
    """

    def __init__(self, host: int, leave: Callable[[int], None] = os._exit):
        self._host, self._leave = host, leave
        self._lock = threading.Lock()
        self.is_sealed = threading.Event()
        """Set once the process is about to end."""

    def end(self, code: int, reason: str, notify: Callable[[int, str], None] | None = None) -> None:
        """Writes one log line, calls `notify` with code and reason, and ends the process.

        A second call waits for the end. The interpreter does not clean up: a thread may wait in a
        collective that never ends, and jax would wait for processes that are gone.
        """
        if not self._lock.acquire(blocking=False):
            threading.Event().wait()
        self.is_sealed.set()
        write = _log.info if code == 0 else _log.error
        write("host %d ends with exit code %d: %s", self._host, code, reason, extra={"kind": None})
        if notify is not None:
            notify(code, reason)
        for handler in logging.getLogger().handlers:
            handler.flush()
        self._leave(code)

    def wait_for_blame(self) -> None:
        """Returns if no other thread ends the process soon: this process itself has failed.

        A lost process is the reason to report, not the collectives with it, which fail too.
        """
        if self.is_sealed.wait(_BLAME_SECONDS):
            threading.Event().wait()

    def catch_aborts(self) -> None:
        """Ends this process with `LOST` where a library would abort it.

        jax's coordination service aborts a process as soon as it loses process 0. That may come before the
        stream of that host breaks.
        """

        def end(number: int) -> None:
            self.end(LOST, "jax lost the process of another host, most likely of host 0")

        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)  # kept as long as the process
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)


class Heartbeats:
    """The time of the last message from each other host."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        """After this time without a message a process counts as lost, as far as this process has run meanwhile."""
        self._clock = RunClock()
        self._received: dict[int, float] = {}

    def record(self, host: int) -> None:
        """Records that a message of this host has arrived."""
        self._received[host] = self._clock.now()

    def silent(self) -> int | None:
        """The number of a host whose last message is older than `seconds`; None if no host is silent."""
        now = self._clock.now()
        last = self._received.copy()  # other threads record
        return next((host for host in last if now - last[host] > self.seconds), None)
