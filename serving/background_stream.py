"""Writes text where a reader may stop: a thread writes, so that no other part of the process waits
for the reader.
"""

import contextlib
import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

_MOST_CHARS = 4 << 20
"""Characters that wait for the reader; further texts are dropped."""
_FLUSH_SECONDS = 1.0


class BackgroundStream:
    """A stream for `print` and `logging` that never waits and never fails.

    Args:
      stream: where texts go; None: nowhere.
      dropped: the text that stands for so many that were dropped, before the next one that is
        written.
      most_chars: see `_MOST_CHARS`.
    """

    def __init__(
        self,
        stream: TextIO | None,
        dropped: Callable[[int], str] = lambda count: "",
        most_chars: int = _MOST_CHARS,
    ):
        self._stream, self._dropped, self._most = stream, dropped, most_chars
        self._texts: deque[str] = deque()
        self._num_chars = self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Writes a text soon, or drops it."""
        with self._changed:
            if self._num_chars + len(text) > self._most:
                self._num_dropped += 1
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="output", daemon=True)
                self._thread.start()
            self._texts.append(text)
            self._num_chars += len(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all is written, for at most a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_chars, _FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text, count = self._texts.popleft(), self._num_dropped
                self._num_dropped = 0
            has_failed = False
            try:
                self._write((self._dropped(count) if count else "") + text)
            except (OSError, ValueError):  # closed, or a full disk
                has_failed = True
            with self._changed:
                self._num_chars -= len(text)
                self._num_dropped += count + 1 if has_failed else 0
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        """Writes past Python's buffer, which would try what has failed again when the interpreter
        exits.
        """
        if self._stream is None:
            return
        try:
            number = self._stream.fileno()
        except io.UnsupportedOperation:
            self._stream.write(text)
            self._stream.flush()
            return
        rest = memoryview(text.encode("utf-8", "replace"))
        while rest:
            try:
                rest = rest[os.write(number, rest) :]
            except BlockingIOError:  # another process has set the descriptor to this mode
                poll = select.poll()
                poll.register(number, select.POLLOUT)
                poll.poll()


def open_standard_streams() -> None:
    """Opens descriptors 0 to 2 where they are closed: a socket would get one of them, and texts
    into it.
    """
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
