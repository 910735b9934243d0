"""Files that are read again when they change.

An invalid replacement is ignored: the last valid content stays in use, and the log says what is
wrong.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle_jax.config import ConfigError

_log = logging.getLogger(__name__)


class WatchedFiles[T]:
    """Some files, and what `read` makes of them.

    Args:
      what: name of the files, for the log.
      paths: `read` is called again when one of them is replaced, rewritten, or a link to another
        file.
      read: reads all files; raises `ConfigError` if they are invalid.

    Raises:
      ConfigError: the files are invalid.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T]):
        self._what, self._paths, self._read = what, paths, read
        self._lock = threading.Lock()  # gRPC performs TLS handshakes in threads of its own
        self._stamps = self._current_stamps()
        self._value = read()

    def value(self) -> T:
        """The newest valid content."""
        with self._lock:
            if self._current_stamps() != self._stamps:
                self._renew()
            return self._value

    def read_again(self) -> None:
        """Reads the files, whether or not they have changed."""
        with self._lock:
            self._renew()

    def _renew(self) -> None:
        self._stamps = self._current_stamps()
        try:
            self._value = self._read()
        except ConfigError as error:
            _log.warning("%s cannot be read again, the old ones stay in use: %s", self._what, error)
        else:
            _log.info("%s were read again", self._what)

    def _current_stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
