"""Executes a plan: tensor bytes -> chunks of Orbax checkpoints, with a few threads of one block each.

Parameters that are a concatenation of tensors are copied file to file by the operating system's kernel
(`copy_file_range`), while another thread reads the source for its hash. Only parameters that a transform
re-orders are read, transformed and written here. Memory does not grow with the model's size.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from convert.blocks import Block, Blocks
from convert.manifest import write_manifest
from convert.partial import JOURNAL, Partial, check_apart, check_room, opened, sync_tree
from convert.plan import WORKERS, Group, Plan
from convert.side_files import copy_headers, copy_side_files
from convert.source import Reader
from peagle_jax.checkpoint.converted import (
    FORMAT,
    Converted,
    as_bytes,
    is_converted,
    sum_of_sums,
)
from peagle_jax.checkpoint.safetensors import CheckpointError, TensorInfo
from peagle_jax.checkpoint.values import NotFinite, NotFiniteCounts

_SUM_BYTES = 1 << 20
_BATCH_BYTES = 1 << 26
_WRITE_BYTES = 1 << 16
"""Bytes per write. Larger writes make the page cache allocate larger folios of fresh memory, which a
virtual machine must request from its host (measured: half the speed)."""

_ENTRY = {"group", "parameters", "tensors", "not_finite"}
"""Keys of a group's entry in the journal."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Result:
    """`skipped`: groups that an earlier run finished; `already`: the conversion was complete before.
    `not_finite` counts NaN and infinity in the source's tensors."""

    nbytes: int
    groups: int
    not_finite: dict[str, NotFinite]
    skipped: int = 0
    skipped_bytes: int = 0
    already: bool = False


class _Pending:
    """Placeholder for an array in the tree that Orbax saves; `_Handler` writes the array."""

    def __init__(self, number: int, blocks: Blocks):
        self.number, self.blocks = number, blocks
        self.shape, self.dtype, self.nbytes = blocks.shape, blocks.dtype, blocks.nbytes


class _Handler(ocp.type_handlers.NumpyHandler):
    """Makes an uncompressed zarr array of each `_Pending`, whose chunks `fill` then writes.

    A chunk is a file `i.0.0` with the bytes of its block in C order. The result equals what Orbax writes
    for numpy arrays, so that plain Orbax can restore it.
    """

    def __init__(self, fill: Callable[[dict[int, Path]], None]):
        super().__init__()
        self._fill = fill

    async def serialize(self, values, infos, args=None):
        opening, folders = [], {}
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            folders[value.number] = Path(info.parent_dir / info.name)
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": str(folders[value.number])},
                "metadata": {
                    "shape": list(value.shape),
                    "chunks": list(value.blocks.chunk),
                    "compressor": None,
                },
                "dtype": ts.dtype(value.dtype).name,
            }
            opening.append(ts.open(ts.Spec(spec), create=True))
        try:
            await asyncio.gather(*opening)
        except ValueError as error:  # tensorstore raises it for any failure, including a full disk
            why = str(error).split(" [")[0]
            raise CheckpointError(f"cannot write an array's description: {why}") from error
        self._fill(folders)
        return []


class _GroupRun:
    """Writes the chunks of one group and computes the hashes `sums`."""

    def __init__(self, group: Group, reader: Reader, pool: ThreadPoolExecutor, progress: Progress):
        self._group, self._reader, self._pool, self._progress = group, reader, pool, progress
        self._tensors: dict[str, str] = {}
        self._digests: dict[int, str] = {}
        self._not_finite: dict[str, NotFinite] = {}
        self._stopped = threading.Event()
        self._buffers = threading.local()

    def fill(self, folders: dict[int, Path]) -> None:
        """Writes all chunks into each member's folder."""
        jobs = [
            self._pool.submit(job, *arguments)
            for _, job, *arguments in sorted(self._work(folders), key=itemgetter(0), reverse=True)
        ]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            self._stopped.set()
            for job in jobs:
                job.cancel()
            wait(jobs)
        for job in jobs:
            job.result()

    def _work(self, folders: dict[int, Path]) -> Iterator[tuple]:
        """Yields (bytes, function, arguments) of each job. Jobs are independent."""
        for number, member in enumerate(self._group.members):
            write = self._copy if member.copied else self._make
            yield member.nbytes, write, number, member, folders[number]
            for infos in _batches(member.infos):
                yield sum(map(_size, infos)), self._sum_tensors, infos

    def _copy(self, number: int, member: Blocks, folder: Path) -> None:
        for block in self._blocks(member):
            with _chunk(folder, member, block) as descriptor:
                for piece in block.pieces:
                    where = (descriptor, piece.offset)
                    self._reader.copy_to(piece.name, piece.begin, piece.end, *where)
            self._progress(block.nbytes)

    def _make(self, number: int, member: Blocks, folder: Path) -> None:
        buffer, digest = self._buffer(member.largest), hashlib.sha256()
        for block in self._blocks(member):
            for piece in block.pieces:
                end = piece.offset + piece.end - piece.begin
                out = memoryview(buffer)[piece.offset : end]
                self._reader.read_into(piece.name, piece.begin, out)
            data = memoryview(as_bytes(block.make(buffer)))
            digest.update(data)
            with _chunk(folder, member, block) as descriptor:
                at = 0
                while at < len(data):
                    at += os.write(descriptor, data[at : at + _WRITE_BYTES])
            self._progress(len(data))
        self._digests[number] = digest.hexdigest()

    def _sum_tensors(self, infos: Sequence[TensorInfo]) -> None:
        buffer, counts = self._buffer(_SUM_BYTES), NotFiniteCounts()
        for info in infos:
            digest, size = hashlib.sha256(), _size(info)
            for begin in range(0, size, _SUM_BYTES):
                if self._stopped.is_set():
                    return
                out = buffer[: min(_SUM_BYTES, size - begin)]
                self._reader.read_into(info.name, begin, memoryview(out))
                digest.update(out)
                counts.add(info.name, out, info.dtype)
            self._tensors[info.name] = digest.hexdigest()
        self._not_finite.update(counts.found())

    def _blocks(self, member: Blocks) -> Iterator[Block]:
        for block in member:
            if self._stopped.is_set():
                return
            yield block

    def _buffer(self, size: int) -> np.ndarray:
        """This thread's buffer, reused between jobs."""
        if getattr(self._buffers, "array", np.empty(0)).nbytes < size:
            self._buffers.array = np.empty(size, np.uint8)
        return self._buffers.array

    def entry(self) -> dict:
        """The group's journal entry: hex hashes of parameters (see `Parameter.sha256`) and of tensors, and
        counts of NaN and infinity."""
        parameters = [
            sum_of_sums([self._tensors[name] for name in member.rule.names])
            if member.copied
            else self._digests[number]
            for number, member in enumerate(self._group.members)
        ]
        return {
            "group": self._group.name,
            "parameters": parameters,
            "tensors": self._tensors,
            "not_finite": self._not_finite,
        }


def _size(info: TensorInfo) -> int:
    return info.end - info.begin


def _batches(infos: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Batches of consecutive tensors, one job each."""
    batch: list[TensorInfo] = []
    for info in infos:
        batch.append(info)
        if sum(map(_size, batch)) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _chunk(folder: Path, member: Blocks, block: Block) -> Iterator[int]:
    """Opens the file of a block. A smaller last block is padded to the chunk size, as zarr requires."""
    numbers = [0] * max(len(member.shape), 1)
    if block.index:
        numbers[0] = block.index[0].start // member.step
    descriptor = os.open(folder / ".".join(map(str, numbers)), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        yield descriptor
        os.truncate(descriptor, member.chunk_bytes)
    finally:
        os.close(descriptor)


def _tree(group: Group) -> dict:
    """The group as the nested dict that Orbax saves; keys are those of the module path."""
    tree: dict = {}
    for number, member in enumerate(group.members):
        node = tree
        for part in member.rule.path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(member.rule.path[-1])] = _Pending(number, member)
    return tree


def _save(folder: Path, group: Group, fill) -> None:
    registry = ocp.type_handlers.create_type_handler_registry((_Pending, _Handler(fill)))
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=False, type_handler_registry=registry
    )
    with closing(ocp.Checkpointer(handler)) as checkpointer:
        checkpointer.save(Path(os.path.realpath(folder)), args=ocp.args.PyTreeSave(_tree(group)))


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Suppresses Orbax's warnings about missing jax.Arrays and nothing to merge; both are expected."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _write_groups(plan: Plan, partial: Partial, progress: Progress) -> dict[str, dict]:
    """Writes the groups that the journal does not list. Returns one journal entry per group."""
    weights = partial.folder / "weights"
    weights.mkdir(exist_ok=True)
    entries = {entry["group"]: entry for entry in partial.done}
    for path in weights.iterdir():
        if path.name not in entries:  # started but not finished
            shutil.rmtree(path)
    commits: list[Future] = []
    with (
        closing(Reader(plan.source.tensors)) as reader,
        ThreadPoolExecutor(WORKERS, thread_name_prefix="convert") as pool,
        ThreadPoolExecutor(1, thread_name_prefix="commit") as commit,
        _quiet_orbax(),
    ):
        for group in plan.groups:
            if group.name in entries:
                progress(group.nbytes)
                continue
            run = _GroupRun(group, reader, pool, progress)
            _save(weights / group.name, group, run.fill)
            # fsync overlaps with the next group only, so that at most one group is not yet on disk.
            if commits:
                commits.pop().result()
            commits.append(commit.submit(_commit, partial, weights, group, run))
        for last in commits:
            last.result()
    return {entry["group"]: entry for entry in partial.done}


def _commit(partial: Partial, weights: Path, group: Group, run: _GroupRun) -> None:
    sync_tree(weights / group.name)
    partial.record(run.entry())


def _identity(plan: Plan) -> dict:
    """The journal's first line: a killed run resumes only if it is unchanged."""
    digest = hashlib.sha256()
    for parameter in plan.parameters():
        digest.update(repr(parameter).encode())
    return {
        "format": FORMAT,
        "name": plan.source.label,
        "files": plan.source.tensors.identity,
        "plan": digest.hexdigest(),
    }


def is_same_conversion(plan: Plan, final: Path) -> bool:
    """Whether `final` already holds the conversion of this source."""
    if not is_converted(final):
        return False
    return Converted(final).manifest["source"]["files"] == plan.source.tensors.identity


def convert(
    plan: Plan, final: Path, *, progress: Progress = lambda nbytes: None, restart: bool = False
) -> Result:
    """Converts into the folder `final`, which appears only when complete. Resumes after a killed run.

    Args:
      plan: from `make_plan`.
      final: must not exist, or be empty, or hold the same conversion.
      progress: called with the bytes of each block written, from this thread.
      restart: delete the partial output of a killed run.
    Raises:
      CheckpointError: left-over or missing tensors, a folder in use or inside of the source, too little
        disk space, or a truncated source.
    """
    plan.source.layout.check(plan.source.model)
    check_apart(final, plan.source.folders)
    if is_same_conversion(plan, final):
        not_finite = Converted(final).not_finite
        return Result(plan.nbytes, len(plan.groups), not_finite, already=True)
    try:
        with opened(final, restart=restart) as partial:
            return _convert(plan, partial, progress)
    except OSError as error:
        raise CheckpointError(
            f"{final}: {error.strerror or error}; what is finished is kept, give the same command again to "
            "go on"
        ) from error


def _convert(plan: Plan, partial: Partial, progress: Progress) -> Result:
    partial.begin(_identity(plan))
    if any(not entry.keys() >= _ENTRY for entry in partial.done):
        raise CheckpointError(f"{partial.folder / JOURNAL}: damaged; give --restart to begin anew")
    done = {entry["group"] for entry in partial.done}
    skipped_bytes = sum(group.nbytes for group in plan.groups if group.name in done)
    check_room(partial.folder, plan.nbytes - skipped_bytes)
    entries = _write_groups(plan, partial, progress)
    written = [sha for group in plan.groups for sha in entries[group.name]["parameters"]]
    parameters = [
        replace(parameter, sha256=sha256)
        for parameter, sha256 in zip(plan.parameters(), written, strict=True)
    ]
    sums = {name: sha for entry in entries.values() for name, sha in entry["tensors"].items()}
    not_finite = {
        name: NotFinite(*counts)  # the journal of a killed run has lists
        for entry in entries.values()
        for name, counts in entry["not_finite"].items()
    }
    copy_side_files(plan.source.tensors.folder, partial.folder)
    copy_headers(plan.source, partial.folder)
    write_manifest(partial.folder, plan, parameters, sums, not_finite)
    partial.finish()
    return Result(plan.nbytes, len(plan.groups), not_finite, len(done), skipped_bytes)
