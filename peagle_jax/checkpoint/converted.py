"""A folder made by `peagle-convert`, read like a `Checkpoint`; parameters come ready joined.

    DST/config.json, tokenizer files, ...    copied
    DST/manifest.json                        what was converted, from what, with which sums
    DST/source/                              headers and index of the safetensors files, for the way back
    DST/weights/0000/, 0001/, ...            Orbax checkpoints, each some parameters by module path

Values have the dtype and the bits of the file. Tensors that no parameter holds (a second copy of a tied
head, a vision tower, `d2t`) are kept too, under paths that begin with "unused".
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path as FilePath

import numpy as np
import tensorstore as ts

from peagle_jax.checkpoint.layout import Path, Rule
from peagle_jax.checkpoint.manifest import check_manifest
from peagle_jax.checkpoint.safetensors import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    Headers,
    entry,
)
from peagle_jax.checkpoint.transforms import IN_ORDER, Copy, Merge
from peagle_jax.checkpoint.values import NotFinite, check_scale

_FORMATS = "peagle-jax converted checkpoint, "
FORMAT = f"{_FORMATS}2"
MANIFEST = "manifest.json"
UNUSED = "unused"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 4}}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One array of a converted folder and the tensors it was joined from.

    `sha256` is that of the array's bytes. Where these are the bytes of several tensors in a row it is
    that of the tensors' own sums (`sum_of_sums`): hashing is what a conversion's time goes into.
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
        """Whether its bytes are those of its tensors, one after the other."""
        return self.transform in {one.name for one in IN_ORDER}

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
    """sha256 of some sums' bytes one after the other; of one sum, itself. All as hex."""
    if len(sums) == 1:
        return sums[0]
    return hashlib.sha256(b"".join(bytes.fromhex(one) for one in sums)).hexdigest()


def is_converted(folder: str | FilePath) -> bool:
    """Whether some version of `peagle-convert` made this folder (its manifest says so; nothing is checked)."""
    try:
        return str(_manifest(FilePath(folder)).get("format")).startswith(_FORMATS)
    except CheckpointError:
        return False


def _manifest(folder: FilePath) -> dict:
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not the manifest of a converted folder ({error})"
        ) from error
    return raw if isinstance(raw, dict) else {}


class Converted(Headers):
    """`tensors`, `names`, `info` and `read` as `Checkpoint` has them, and `joined(rule)`: a parameter as
    stored. `info(name)` is the header entry of the source, with offsets in the source's file. `not_finite`
    counts NaN and infinity in the source's tensors, by name of those that have any.

    Raises:
      CheckpointError: no converted folder, or (when reading) an array is missing or damaged.
    """

    def __init__(self, folder: str | FilePath):
        self.folder = FilePath(folder)
        self.manifest = _manifest(self.folder)
        if self.manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.folder / MANIFEST}: format {self.manifest.get('format')!r}, not {FORMAT!r}; "
                "convert the checkpoint again"
            )
        path = self.folder / MANIFEST
        check_manifest(self.manifest, path)
        found = [Parameter.from_json(raw) for raw in self.manifest["parameters"]]
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
        self.parameters = {parameter.path: parameter for parameter in found}
        self._context = ts.Context(_CONTEXT)

    @cached_property
    def _holder(self) -> dict[str, Parameter]:
        return {name: one for one in self.parameters.values() for name in one.names}

    def read(self, name: str) -> np.ndarray:
        """A source tensor that was not joined with others, in its own shape.

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
        """What `rule` makes of its tensors; equal to the rule's own join over the source.

        Raises:
          CheckpointError: the folder holds no such parameter, or it was made by another rule.
        """
        parameter = self.parameters.get(rule.path)
        if parameter is None or not self.made_by(parameter, rule):
            raise CheckpointError(
                f"{self.folder}: {'.'.join(map(str, rule.path))} is missing or was converted in another "
                "way; convert the checkpoint again with this version"
            )
        return self.parameter(rule.path)

    def made_by(self, parameter: Parameter, rule: Rule) -> bool:
        """Whether the manifest describes what `rule` makes: tensors, transform, dtype and shape."""
        if (parameter.names, parameter.transform) != (rule.names, rule.transform.name):
            return False
        infos = [self.tensors[name] for name in rule.names]
        shape = rule.transform.shape([info.shape for info in infos])
        return parameter.shape == shape and all(info.dtype == parameter.dtype for info in infos)

    def same_bytes(self, first: str, second: str) -> bool:
        """By their sums in the manifest; nothing is read."""
        sums = [self.manifest["tensors"][name]["sha256"] for name in (first, second)]
        return self._alike(first, second) and sums[0] == sums[1]

    def parameter(self, path: Path) -> np.ndarray:
        """The array at a module path, whole."""
        parameter = self.parameters[path]
        try:
            return self.store(parameter).read().result()
        except ValueError as error:
            raise self._damaged(parameter, error) from error

    def blocks(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """The array in pieces along axis 0, as they lie on disk: a few ten megabytes each."""
        store = self.store(parameter)
        if not parameter.shape:
            yield self.parameter(parameter.path)
            return
        step, rows = store.chunk_layout.read_chunk.shape[0], parameter.shape[0]
        ahead = deque()
        for start in (*range(0, rows, step), None):
            if start is not None:
                ahead.append(store[start : min(start + step, rows)].read())
            if len(ahead) > 1 or (ahead and start is None):  # one is read while one is used
                try:
                    yield ahead.popleft().result()
                except ValueError as error:
                    raise self._damaged(parameter, error) from error

    def check(self, parameter: Parameter) -> None:
        """Compares the stored bytes with the manifest's sum.

        Raises:
          CheckpointError: they differ.
        """
        sizes = [info.end - info.begin for info in map(self.info, parameter.names)]
        digests = [hashlib.sha256()]
        room = sizes[0] if parameter.in_order else parameter.nbytes
        for block in self.blocks(parameter):
            data = as_bytes(block)
            while data.nbytes:
                while not room:
                    room = sizes[len(digests)]
                    digests.append(hashlib.sha256())
                digests[-1].update(data[:room])
                room, data = room - len(data[:room]), data[room:]
        found = sum_of_sums([digest.hexdigest() for digest in digests])
        if found != parameter.sha256:
            raise CheckpointError(
                f"{self.folder}: {parameter.key} in weights/{parameter.group} is not what was written "
                f"(sha256 {found[:12]}, the manifest says {parameter.sha256[:12]})"
            )

    def store(self, parameter: Parameter) -> ts.TensorStore:
        """The array as a tensorstore, nothing of it read; shape and dtype are the manifest's."""
        folder = self.folder / "weights" / parameter.group / parameter.key
        spec = {
            "driver": "zarr",
            # tensorstore takes no "..".
            "kvstore": {"driver": "file", "path": os.path.realpath(folder)},
            # Else a chunk that is missing would read as zeros.
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
            # tensorstore would allocate all of it, and end the process where that fails.
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
    """The array's bytes in C order as uint8 [n], a view if they lie so: what sums are taken of."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def open_checkpoint(folder: str | FilePath) -> Checkpoint | Converted:
    """A model folder of either kind; both have `tensors` and `read`.

    Raises:
      CheckpointError: neither kind, or a broken one.
    """
    return Converted(folder) if is_converted(folder) else Checkpoint(folder)


def joined(checkpoint: Checkpoint | Converted, rule: Rule) -> np.ndarray:
    """The parameter that `rule` makes: as it is stored if it was joined before, else joined here.

    Raises:
      CheckpointError: as `read` and `Converted.joined`, or a scale is no positive finite number.
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
