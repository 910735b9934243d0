"""`Checkpoint` of a folder written by `peagle-convert`, with fused parameters.

    DST/config.json, tokenizer files, ...    copied
    DST/manifest.json                        source, versions, checksums of tensors and parameters
    DST/source/                              headers and index of the safetensors files
    DST/weights/0000/                        an Orbax checkpoint, parameters by module path

Values keep the dtype and the bits of the source. Tensors that belong to no parameter (the second
copy of a tied head, a vision tower, `d2t`) are stored too, under paths that begin with "unused".
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path as FilePath
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np

from peagle_jax.checkpoint.layout import Path, Rule
from peagle_jax.checkpoint.manifest import check_manifest
from peagle_jax.checkpoint.safetensors import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    Headers,
    NamedArrays,
    entry,
)
from peagle_jax.checkpoint.transforms import IN_ORDER, Copy, Merge
from peagle_jax.checkpoint.values import NotFinite, check_scale

if TYPE_CHECKING:
    import tensorstore as ts

_FORMATS = "peagle-jax converted checkpoint, "
FORMAT = f"{_FORMATS}2"
MANIFEST = "manifest.json"
UNUSED = "unused"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 4}}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One array of a converted folder, and the source tensors it was fused from.

    `sha256` is the hash of the array's bytes. If these are the concatenated bytes of several
    tensors, it is the hash of the tensors' hashes (`sum_of_sums`), because hashing dominates the
    conversion time.
    """

    path: Path
    names: tuple[str, ...]
    transform: str
    dtype: np.dtype
    shape: tuple[int, ...]
    group: str
    sha256: str = ""

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def in_order(self) -> bool:
        """Whether its bytes are the concatenation of its tensors' bytes."""
        return self.transform in {transform.name for transform in IN_ORDER}

    def as_json(self) -> dict:
        return {
            "path": list(self.path),
            "names": list(self.names),
            "transform": self.transform,
            "dtype": DTYPE_NAMES[self.dtype],
            "shape": list(self.shape),
            "group": self.group,
            "sha256": self.sha256,
        }

    @staticmethod
    def from_json(raw: dict) -> "Parameter":
        return Parameter(
            path=tuple(raw["path"]),
            names=tuple(raw["names"]),
            transform=raw["transform"],
            dtype=DTYPES[raw["dtype"]],
            shape=tuple(raw["shape"]),
            group=raw["group"],
            sha256=raw["sha256"],
        )


def sum_of_sums(sums: list[str]) -> str:
    """SHA-256 of the concatenated hashes; a single hash is returned unchanged. All in hex."""
    if len(sums) == 1:
        return sums[0]
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in sums)).hexdigest()


def is_converted(folder: str | FilePath) -> bool:
    """Whether the folder has a manifest of any version of `peagle-convert`; checks nothing else."""
    try:
        return str(_manifest(FilePath(folder)).get("format")).startswith(_FORMATS)
    except CheckpointError:
        return False


def _manifest(folder: FilePath) -> dict:
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no converted folder (no {MANIFEST}); `peagle-convert convert` makes one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not the manifest of a converted folder ({error})"
        ) from error
    return raw if isinstance(raw, dict) else {}


class Converted(Headers):
    """`tensors`, `names`, `info` and `read` as `Checkpoint` has them, and `joined(rule)`: a
    parameter as stored. `info(name)` is the header entry of the source, with offsets in the
    source's file. `not_finite` counts NaN and infinity in the source's tensors, by name of those
    that have any.

    Raises:
      CheckpointError: no converted folder, or (when reading) an array is missing or damaged.
    """

    def __init__(self, folder: str | FilePath):
        self.folder = FilePath(folder)
        self.manifest, path = _manifest(self.folder), self.folder / MANIFEST
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}: format {self.manifest.get('format')!r}, not {FORMAT!r}; "
                "convert the checkpoint again"
            )
        check_manifest(self.manifest, path)
        parameters = [Parameter.from_json(raw) for raw in self.manifest["parameters"]]
        self.tensors = {
            name: entry(
                path, name, raw | {"data_offsets": [raw["begin"], raw["end"]]}, 0, raw["end"]
            )
            for name, raw in self.manifest["tensors"].items()
        }
        self.not_finite = {
            name: NotFinite(raw["nan"], raw["inf"])
            for name, raw in self.manifest["not_finite"].items()
        }
        self.parameters = {parameter.path: parameter for parameter in parameters}
        import tensorstore as ts  # takes 0.1 s, and other checkpoints do not need it

        self._context = ts.Context(_CONTEXT)

    @cached_property
    def _holder(self) -> dict[str, Parameter]:
        return {
            name: parameter for parameter in self.parameters.values() for name in parameter.names
        }

    def read(self, name: str) -> np.ndarray:
        """A source tensor that was not fused with others, in its source shape.

        Raises:
          CheckpointError: no such tensor, or it is a part of a larger parameter (use `joined`).
        """
        if name not in self._holder:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        parameter, info = self._holder[name], self.tensors[name]
        if parameter.transform not in (Copy.name, Merge.name):
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} is only there as a part of {parameter.key}"
            )
        return self.parameter(parameter.path).reshape(info.shape)

    def joined(self, rule: Rule) -> np.ndarray:
        """The stored parameter of `rule`; equal to `rule.transform.join` of the source tensors.

        Raises:
          CheckpointError: the folder holds no such parameter, or it was made by another rule.
        """
        parameter = self.parameters.get(rule.path)
        if parameter is None or not self.made_by(parameter, rule):
            raise CheckpointError(
                f"{self.folder}: {'.'.join(map(str, rule.path))} is missing or was converted in "
                "another way; convert the checkpoint again with this version"
            )
        return self.parameter(rule.path)

    def made_by(self, parameter: Parameter, rule: Rule) -> bool:
        """Whether the manifest entry matches `rule` in tensors, transform, dtype and shape."""
        if (parameter.names, parameter.transform) != (rule.names, rule.transform.name):
            return False
        infos = [self.tensors[name] for name in rule.names]
        shape = rule.transform.shape([info.shape for info in infos])
        return parameter.shape == shape and all(info.dtype == parameter.dtype for info in infos)

    def same_bytes(self, first: str, second: str) -> bool:
        """Compares their hashes in the manifest; reads no contents."""
        sums = [self.manifest["tensors"][name]["sha256"] for name in (first, second)]
        return self._alike(first, second) and sums[0] == sums[1]

    def parameter(self, path: Path) -> np.ndarray:
        """The array at a module path, whole."""
        return self._values(self.parameters[path], ...)

    def rows(self, path: Path) -> Iterator[tuple[int, np.ndarray]]:
        """The array at a module path, a chunk at a time: (first row, rows); a scalar as one row."""
        parameter = self.parameters[path]
        if not parameter.shape:
            yield 0, self.parameter(path)[None]
            return
        count, step = parameter.shape[0], self.store(parameter).chunk_layout.read_chunk.shape[0]
        for first in range(0, count, step):
            yield first, self._values(parameter, slice(first, min(first + step, count)))

    def _values(self, parameter: Parameter, rows: slice | EllipsisType) -> np.ndarray:
        try:
            return self.store(parameter)[rows].read().result()
        except ValueError as error:
            raise self._damaged(parameter, error) from error

    def store(self, parameter: Parameter) -> "ts.TensorStore":
        """Opens the array with tensorstore without reading it; checks shape and dtype by the
        manifest."""
        import tensorstore as ts

        folder = self.folder / "weights" / parameter.group / parameter.key
        spec = {
            "driver": "zarr",
            # tensorstore accepts no "..".
            "kvstore": {"driver": "file", "path": os.path.realpath(folder)},
            # Without this a missing chunk would read as zeros.
            "fill_missing_data_reads": False,
        }
        try:
            store = ts.open(ts.Spec(spec), open=True, read=True, context=self._context).result()
        except ValueError as error:
            raise self._damaged(parameter, error) from error
        if (store.shape, store.dtype.numpy_dtype) != (parameter.shape, parameter.dtype):
            what = f"{store.dtype.name} {store.shape}, not {parameter.dtype} {parameter.shape}"
            raise self._damaged(parameter, what)
        chunk = store.chunk_layout.read_chunk.shape or ()  # None of a scalar
        if any(step > max(n, 1) for step, n in zip(chunk, store.shape, strict=True)):
            # tensorstore would allocate the chunk and abort the process if that fails.
            raise self._damaged(
                parameter, f"chunks {chunk} are larger than the array {store.shape}"
            )
        return store

    def _damaged(self, parameter: Parameter, why) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: {parameter.key} in weights/{parameter.group} cannot be read: "
            f"{str(why).split(' [')[0]}"
        )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The array's bytes in C order as uint8 [n], for hashing; a view if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def open_checkpoint(folder: str | FilePath) -> Checkpoint | Converted:
    """A model folder of either kind; both have `tensors` and `read`.

    Raises:
      CheckpointError: neither kind, or a broken one.
    """
    return Converted(folder) if is_converted(folder) else Checkpoint(folder)


def joined(checkpoint: Checkpoint | Converted | NamedArrays, rule: Rule) -> np.ndarray:
    """The parameter of `rule`: read from a converted folder, or fused here from the source tensors.

    Raises:
      CheckpointError: as `read` and `Converted.joined`, or a scale is not a positive finite number.
    """
    is_scale = rule.path[-1] == "scale"
    if isinstance(checkpoint, Converted):
        array = checkpoint.joined(rule)
        if is_scale:
            check_scale(".".join(map(str, rule.path)), array)
        return array
    parts = [checkpoint.read(name) for name in rule.names]
    if is_scale:
        for name, part in zip(rule.names, parts, strict=True):
            check_scale(name, part)
    return rule.transform.join(parts)
