"""Reads bytes of files into memory, from several threads.

Explicit reads, not mapped files: a thread that waits for a page of a mapping holds the
interpreter's lock while numpy copies, and pays a page fault for every few kilobytes of the page
cache.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.safetensors import CheckpointError

MOST_BYTES = 8 << 20
"""Bytes of one read in place. Longer reads leave the processor's cache, shorter ones cost system
calls."""
_MOST_PIECES = 256
"""Pieces of one read. Linux takes 1,024."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of a file, and what becomes of them.

    Args:
      name: of the tensor, for messages.
      begin: absolute offset in the file.
      out: where the bytes go unchanged, uint8 [size]; None: `place` gets them in memory that it
        must not keep.
      filled: called once the bytes are where they belong.
    """

    path: Path
    name: str
    begin: int
    size: int
    out: np.ndarray | None
    place: Callable[[np.ndarray], None] | None
    filled: Callable[[], None]

    @property
    def end(self) -> int:
        return self.begin + self.size


def in_place(
    path: Path, name: str, begin: int, out: np.ndarray, filled: Callable[[], None]
) -> Iterator[Span]:
    """Spans of at most `MOST_BYTES` that read `len(out)` bytes from `begin` into `out`, uint8
    [n]."""
    for start in range(0, len(out), MOST_BYTES):
        part = out[start : start + MOST_BYTES]
        yield Span(path, name, begin + start, len(part), part, None, filled)


def batches(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in the order of the files; those that follow each other and are read in place share one
    read."""
    found: list[list[Span]] = []
    size = 0
    for span in sorted(spans, key=lambda span: (str(span.path), span.begin, span.size)):
        last = found[-1][-1] if found else None
        follows = last is not None and (last.path, last.end) == (span.path, span.begin)
        is_whole = span.out is None or (last is not None and last.out is None)
        fits = size + span.size <= MOST_BYTES and found and len(found[-1]) < _MOST_PIECES
        if follows and not is_whole and fits:
            found[-1].append(span)
            size += span.size
        else:
            found.append([span])
            size = span.size
    return found


class FileReader:
    """Open files, and scratch memory of each thread that reads them."""

    def __init__(self):
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *_) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, spans: list[Span]) -> int:
        """Reads one of `batches`, calls `place` and `filled`, and returns the number of bytes.

        Raises:
          CheckpointError: the file ends before, or cannot be read.
        """
        first, size = spans[0], sum(span.size for span in spans)
        if first.out is None:
            scratch = self._memory(first.size)
            self._fill(spans, [scratch])
            first.place(scratch)
        else:
            self._fill(spans, [span.out for span in spans])
        for span in spans:
            span.filled()
        return size

    def _memory(self, size: int) -> np.ndarray:
        """This thread's memory, uint8 [size], aligned for every dtype."""
        if getattr(self._scratch, "array", np.empty(0)).nbytes < size:
            self._scratch.array = np.empty(size, np.uint8)
        return self._scratch.array[:size]

    def _fill(self, spans: list[Span], pieces: list[np.ndarray]) -> None:
        path, at = spans[0].path, spans[0].begin
        views = [memoryview(piece) for piece in pieces]
        try:
            descriptor = self._open(path)
            while views:
                count = os.preadv(descriptor, views, at)
                if not count:
                    tensor = next(span.name for span in spans if at < span.end)
                    raise CheckpointError(
                        f"{path}: truncated: it ends at byte {at}, inside tensor {tensor!r}"
                    )
                at += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read at byte {at}: {error.strerror}"
            ) from error

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]
