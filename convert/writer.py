"""Executes a plan: a source's tensors become one Orbax checkpoint, with sums and a manifest."""

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from convert.output import copy_side_files, new_folder
from convert.plan import GROUP, Plan
from convert.source import Source, read_header_bytes
from peagle_jax.checkpoint.converted import (
    DTYPE_NAMES,
    FORMAT,
    MANIFEST,
    Converted,
    Parameter,
    as_bytes,
    is_converted,
    sum_of_sums,
)
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import INDEX, CheckpointError
from peagle_jax.checkpoint.values import NotFinite, not_finite

_CHUNK_BYTES = 32_000_000
_THREADS = 4  # most of the time goes into hashing
_TOOLS = ("peagle-jax", "orbax-checkpoint", "tensorstore", "jax", "numpy")

Progress = Callable[[int], None]


@dataclass
class Sums:
    """SHA-256 in hex, and counts of NaN and infinity, of tensors and of parameters by path."""

    tensors: dict[str, str] = field(default_factory=dict)
    parameters: dict[tuple, str] = field(default_factory=dict)
    not_finite: dict[str, NotFinite] = field(default_factory=dict)

    def add(
        self,
        pool: ThreadPoolExecutor,
        parameter: Parameter,
        parts: list[np.ndarray],
        joined: np.ndarray,
    ) -> None:
        """Those of a parameter and its tensors (`Parameter.sha256` says which is whose)."""
        summed = zip(
            parameter.names, pool.map(_sum, parts), pool.map(not_finite, parts), strict=True
        )
        for name, digest, counts in summed:
            self.tensors[name] = digest
            if any(counts):
                self.not_finite[name] = counts
        if parameter.in_order:
            digests = [self.tensors[name] for name in parameter.names]
            self.parameters[parameter.path] = sum_of_sums(digests)
        else:
            self.parameters[parameter.path] = _sum(joined)


def _sum(array: np.ndarray) -> str:
    return hashlib.sha256(as_bytes(array)).hexdigest()


class _Pending:
    """Stands for an array in the tree that Orbax saves; `_Handler` writes the array."""

    def __init__(self, rule: Rule, parameter: Parameter):
        self.rule, self.parameter = rule, parameter
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self.nbytes = parameter.nbytes


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes an uncompressed zarr array for each `_Pending`, in turn, in chunks of rows.

    The result is what Orbax writes for numpy arrays, so that plain Orbax restores it.
    """

    def __init__(self, source: Source, progress: Progress):
        super().__init__()
        self.sums = Sums()
        self._source, self._progress = source, progress

    async def serialize(self, values, infos, args=None):
        with ThreadPoolExecutor(_THREADS) as pool:
            for value, info in zip(values, infos, strict=True):
                await info.await_path_creation()
                await self._make(value, info.parent_dir / info.name, pool)
                self._progress(value.nbytes)
        return []

    async def _make(self, value: _Pending, path: Path, pool: ThreadPoolExecutor) -> None:
        parts = [self._source.read(name) for name in value.rule.names]
        array = np.asarray(value.rule.transform.join(parts)).reshape(value.shape)
        summing = asyncio.to_thread(self.sums.add, pool, value.parameter, parts, array)
        await asyncio.gather(_write(path, array), summing)


async def _write(path: Path, array: np.ndarray) -> None:
    rows, row_bytes = array.shape[:1] or (1,), prod(array.shape[1:]) * array.dtype.itemsize
    step = max(min(_CHUNK_BYTES // max(row_bytes, 1), *rows), 1)
    chunk = (step, *(max(n, 1) for n in array.shape[1:])) if array.shape else ()
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": os.path.realpath(path)},
        "metadata": {"shape": list(array.shape), "chunks": list(chunk), "compressor": None},
        "dtype": ts.dtype(array.dtype).name,
        "store_data_equal_to_fill_value": True,  # else a chunk of zeros would have no file
    }
    try:
        store = await ts.open(ts.Spec(spec), create=True)
        if not array.shape:
            await store.write(array)
        # A chunk at a time: tensorstore holds a copy of what it writes.
        for first in range(0, len(array) if array.shape else 0, step):
            last = min(first + step, len(array))
            await store[first:last].write(array[first:last])
    except ValueError as error:  # tensorstore raises it for any failure, including a full disk
        raise CheckpointError(f"cannot write {path}: {str(error).split(' [')[0]}") from error


def _save(plan: Plan, folder: Path, progress: Progress) -> Sums:
    tree: dict = {}
    for rule, parameter in zip(plan.rules, plan.parameters, strict=True):
        node = tree
        for part in rule.path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(rule.path[-1])] = _Pending(rule, parameter)
    writer = _Handler(plan.source, progress)
    with _quiet():
        registry = ocp.type_handlers.create_type_handler_registry((_Pending, writer))
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=False, type_handler_registry=registry
        )
        with closing(ocp.Checkpointer(handler)) as checkpointer:
            checkpointer.save(Path(os.path.realpath(folder)), args=ocp.args.PyTreeSave(tree))
    return writer.sums


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's warnings of missing jax.Arrays and nothing to merge; both are expected.

    SIGINT ends the process: a KeyboardInterrupt would close Orbax's event loops while its threads
    still call them, and each such call prints a traceback. os.write, because print() cannot be
    called while it is interrupted. Main thread only.
    """

    def end(*_) -> None:
        os.write(2, b"\ninterrupted; the same command begins anew\n")
        os._exit(128 + signal.SIGINT)

    logger, level = logging.getLogger("absl"), logging.getLogger("absl").level
    previous = signal.signal(signal.SIGINT, end)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        signal.signal(signal.SIGINT, previous)


def convert(
    plan: Plan, final: Path, *, progress: Progress = lambda nbytes: None
) -> dict[str, NotFinite] | None:
    """Converts into the folder `final`, which appears only when complete.

    Args:
      final: must not exist, or be empty, or hold the same conversion.
      progress: called with the bytes of each parameter written.
    Returns counts of NaN and infinity in the source's tensors; None where all was done before.

    Raises:
      CheckpointError: left-over or missing tensors, a folder in use or inside of the source, too
        little disk space, or a truncated source.
    """
    source = plan.source
    source.layout.check(source.model)
    if is_converted(final) and Converted(final).manifest["source"]["files"] == source.files:
        return None
    read = [source.folder, *([source.target_folder] if source.target_folder else [])]
    with new_folder(final, plan.nbytes, read) as folder:
        (folder / "weights").mkdir()
        sums = _save(plan, folder / "weights" / GROUP, progress)
        copy_side_files(source.folder, folder)
        _copy_headers(source, folder / "source")
        _write_manifest(folder, plan, sums)
    return sums.not_finite


def _copy_headers(source: Source, kept: Path) -> None:
    """Headers and index of the source's files byte for byte, and the config of a head's target."""
    kept.mkdir()
    for path in source.checkpoint.files:
        (kept / f"{path.name}.header").write_bytes(read_header_bytes(path))
    if (source.folder / INDEX).is_file():
        shutil.copyfile(source.folder / INDEX, kept / INDEX)
    if source.target_folder is not None:
        (kept / "target").mkdir()
        for path in source.target_folder.glob("*config.json"):
            shutil.copyfile(path, kept / "target" / path.name)


def _versions() -> dict[str, str]:
    """Of the packages that write a folder."""
    versions = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            versions[name] = "unknown"
    return versions


def _write_manifest(folder: Path, plan: Plan, sums: Sums) -> None:
    source = plan.source
    raw = {
        "format": FORMAT,
        "kind": source.kind,
        "model": source.model,
        "tool": _versions(),
        "source": {"name": source.label, "files": source.files},
        "dropped": source.layout.dropped,
        "not_finite": {name: counts._asdict() for name, counts in sums.not_finite.items()},
        "tensors": {
            name: {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "file": source.checkpoint.file_of[name].name,
                "begin": info.begin,
                "end": info.end,
                "sha256": sums.tensors[name],
            }
            for name, info in source.checkpoint.tensors.items()
        },
        "parameters": [
            replace(one, sha256=sums.parameters[one.path]).as_json() for one in plan.parameters
        ],
    }
    text = json.dumps(raw, separators=(",", ":")).replace('},"', '},\n"').replace("},{", "},\n{")
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
