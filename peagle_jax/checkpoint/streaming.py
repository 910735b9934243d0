"""Fills parameters from a checkpoint: threads read in the order of the files, while devices receive
what is complete.

Parameters travel in groups whose bytes lie together in the files, as the experts' of one layer.
Memory of the host is bounded by `_MOST_BYTES`, or one group if that is larger.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import jax
import numpy as np

from peagle_jax.checkpoint.assembly import FileAssembly
from peagle_jax.checkpoint.reads import FileReader, batches
from peagle_jax.checkpoint.staging import Staging

_log = logging.getLogger(__name__)
_MOST_BYTES = 1536 << 20
_MOST_UPLOADING = 768 << 20
"""Bytes on their way to devices. XLA copies them into pinned memory of its own, which grows to as
much."""
_GROUP_BYTES = 128 << 20, 768 << 20
"""Least and most of a group, but for a single parameter."""
_LOGGED_BYTES = 1 << 30
_BAR_DELAY = 1.0  # seconds; a small model shows no bar


@dataclass
class _Group:
    """Parameters that are read together."""

    assemblies: list[FileAssembly]
    nbytes: int
    reads: list[Future] = field(default_factory=list)
    arrays: list[jax.Array] = field(default_factory=list)
    block: np.ndarray | None = None

    @property
    def is_read(self) -> bool:
        return all(read.done() for read in self.reads)


def stream(
    assemblies: Sequence[FileAssembly],
    put: Callable[[FileAssembly], jax.Array],
    *,
    is_copied: bool,
) -> None:
    """Reads all parameters and calls `put` for each in this thread, in the order of the files.

    Args:
      put: makes an array from complete shares and keeps it; it may return before the device has its
        copy.
      is_copied: whether devices copy, so that host memory can be used again; else they keep it.

    Raises:
      CheckpointError: of the thread that failed first. All threads have ended then.
    """
    started, total = time.perf_counter(), sum(assembly.num_read for assembly in assemblies)
    with _Pipeline(put, total, is_copied=is_copied) as pipeline:
        for group in _groups(assemblies):
            pipeline.add(group)
        pipeline.finish()
    seconds = time.perf_counter() - started
    if total >= _LOGGED_BYTES:
        _log.info("%.1f GB in %.1f s, %.2f GB/s", total / 1e9, seconds, total / 1e9 / seconds)


def _groups(assemblies: Iterable[FileAssembly]) -> Iterator[_Group]:
    """Groups in the order of the files. Parameters of one group interleave, or are small."""
    least, most = _GROUP_BYTES
    group, nbytes, end = [], 0, ("", 0)
    placed = [(_extent(assembly), assembly) for assembly in assemblies]
    for (begin, last), assembly in sorted(placed, key=lambda each: each[0]):
        is_apart = begin >= end
        if group and ((is_apart and nbytes >= least) or nbytes + assembly.nbytes > most):
            yield _Group(group, nbytes)
            group, nbytes = [], 0
        group.append(assembly)
        nbytes += assembly.nbytes
        end = max(end, last)
    if group:
        yield _Group(group, nbytes)


def _extent(assembly: FileAssembly) -> tuple[tuple[str, int], tuple[str, int]]:
    """First and last place in the files."""
    places = assembly.places
    return min(place[:2] for place in places), max((path, end) for path, _, end in places)


class _Pipeline:
    """Groups that are read, then groups of which devices receive copies, both oldest first."""

    def __init__(self, put: Callable[[FileAssembly], jax.Array], total: int, *, is_copied: bool):
        from tqdm import tqdm

        self._put = put
        self._staging = Staging(is_reused=is_copied, most=_MOST_BYTES)
        self._files = FileReader()
        self._pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="weights")
        self._reading: deque[_Group] = deque()
        self._uploading: deque[_Group] = deque()
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._bar = tqdm(
            total=total,
            desc="weights",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=None,
            delay=_BAR_DELAY,
        )

    def __enter__(self) -> "_Pipeline":
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        self._files.__exit__()
        self._bar.close()

    def add(self, group: _Group) -> None:
        """Begins to read a group as soon as there is room, and puts on devices what is complete."""
        while self._held and self._held + group.nbytes > _MOST_BYTES:
            self._step()
        memories, group.block = self._staging.take([one.nbytes for one in group.assemblies])
        spans = []
        for assembly, memory in zip(group.assemblies, memories, strict=True):
            spans += assembly.spans(memory)
        for batch in batches(spans):
            group.reads.append(self._pool.submit(self._run, self._files.read, batch))
        self._reading.append(group)
        while self._reading and self._reading[0].is_read:
            self._upload()

    def finish(self) -> None:
        while self._held:
            self._step()

    @property
    def _held(self) -> int:
        return sum(group.nbytes for group in (*self._reading, *self._uploading))

    def _run(self, read: Callable[..., int], *arguments) -> None:
        if self._stopped.is_set():
            return
        count = read(*arguments)
        with self._lock:
            self._bar.update(count)

    def _step(self) -> None:
        """Waits for the oldest upload, or for the oldest group to be read if it is complete or
        nothing else is left."""
        if self._reading and (self._reading[0].is_read or not self._uploading):
            self._upload()
        else:
            self._release()

    def _upload(self) -> None:
        group = self._reading[0]
        wait(group.reads, return_when=FIRST_EXCEPTION)
        for read in group.reads:
            if read.done():
                read.result()
        while self._uploading and self._num_uploading + group.nbytes > _MOST_UPLOADING:
            self._release()
        self._reading.popleft()
        self._uploading.append(group)
        for assembly in group.assemblies:
            group.arrays.append(self._put(assembly))
            assembly.shares = {}

    @property
    def _num_uploading(self) -> int:
        return sum(group.nbytes for group in self._uploading)

    def _release(self) -> None:
        group = self._uploading.popleft()
        jax.block_until_ready(group.arrays)
        self._staging.give_back(group.block)


def _num_threads() -> int:
    """Some wait for the disk while others copy; more than 16 gain nothing."""
    return max(4, min(16, os.cpu_count() or 1))
