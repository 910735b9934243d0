"""Memory-mapped safetensors: reads every dtype of JAX (bf16 and FP8 included) without copying."""

import json
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from peagle_jax.config import ConfigError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1024 * 1024
_COMPARED_BYTES = 1 << 20

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
_OTHER_DTYPES = ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "C64")
"""Dtypes of the format that no supported model has."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


_LONGEST_MESSAGE = 4000


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it.

    It quotes untrusted files, so it is cut after some thousand characters.
    """

    def __init__(self, text: str):
        cut = len(text) > _LONGEST_MESSAGE
        super().__init__(f"{text[:_LONGEST_MESSAGE]}.." if cut else text)


@dataclass(frozen=True)
class TensorInfo:
    """One header entry; `begin` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _unique(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is used twice")
    return found


def _whole(n) -> int:
    if type(n) is not int:
        raise TypeError(f"{n!r} is not a whole number")
    return n


def entry(path: Path, name: str, raw, data_start: int, file_size: int) -> TensorInfo:
    """A header's entry, checked.

    Args:
      path: of the file that states it, for the message.
      raw: {"dtype", "shape", "data_offsets"}; the offsets count from `data_start`.
    Raises:
      CheckpointError: a key is missing or of another kind, or dtype, shape and offsets disagree.
    """
    named = raw.get("dtype") if isinstance(raw, dict) else None
    if named in _OTHER_DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} is {named}, which is not supported")
    try:
        dtype = DTYPES[raw["dtype"]]
        shape = tuple(_whole(n) for n in raw["shape"])
        begin, end = (_whole(n) for n in raw["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: bad header entry for tensor {name!r}: {raw!r}") from error
    size = dtype.itemsize
    for n in shape:
        size *= n
    if min(shape, default=0) < 0 or not 0 <= begin <= end or end - begin != size:
        raise CheckpointError(
            f"{path}: tensor {name!r} claims {shape} {dtype} in bytes {begin}..{end}, which "
            "disagree"
        )
    if data_start + end > file_size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name!r} ends at byte {data_start + end} of {file_size}"
        )
    return TensorInfo(name, dtype, shape, data_start + begin, data_start + end)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensor table of one file.

    Raises:
      CheckpointError: not a safetensors file, or its header contradicts itself or the file's size.
    """
    file_size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, file_size - 8):
            raise CheckpointError(f"{path}: not a safetensors file (header length {length})")
        try:
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors file (header: {error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (header is not an object)")
    header.pop("__metadata__", None)
    table = {name: entry(path, name, raw, 8 + length, file_size) for name, raw in header.items()}
    end = 8 + length
    for info in sorted(table.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != end:
            raise CheckpointError(
                f"{path}: tensor {info.name!r} begins at byte {info.begin}, not {end} where the "
                "one before it ends"
            )
        end = info.end
    if end != file_size:
        raise CheckpointError(f"{path}: {file_size - end} bytes after the last tensor")
    return table


def _weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, by an index file.

    Raises:
      CheckpointError: not an index, or one that names no tensor.
    """
    try:
        raw = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        weight_map = dict(raw["weight_map"])
        if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("weight_map does not map names to files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a weight index") from error
    return weight_map


class Headers(ABC):
    """Tensor headers by name. Subclasses read the contents."""

    tensors: dict[str, TensorInfo]

    @abstractmethod
    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors have one dtype, one shape, and the same bytes."""

    def names(self) -> list[str]:
        return list(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def _alike(self, first: str, second: str) -> bool:
        one, other = self.info(first), self.info(second)
        return (one.dtype, one.shape) == (other.dtype, other.shape)


def is_deleted(array: Any) -> bool:
    """Whether an array of jax has given its memory away, as by donation; one of numpy never has."""
    return getattr(array, "is_deleted", bool)()


class NamedArrays(Headers):
    """Tensors in memory, of jax or numpy, with the names that a checkpoint gives them.

    Raises:
      CheckpointError: an item is no pair of a name and an array, a name comes twice, or an array is
        deleted.
    """

    def __init__(self, arrays: Iterable[tuple[str, Any]]):
        self._arrays = {}
        for pair in arrays:
            match pair:
                case (str(name), array) if hasattr(array, "nbytes"):
                    pass
                case _:
                    kind = type(pair).__name__
                    raise CheckpointError(f"weights are pairs of a name and an array: {kind} found")
            if name in self._arrays:
                raise CheckpointError(f"tensor {name!r} comes twice")
            if is_deleted(array):
                raise CheckpointError(f"tensor {name!r} is deleted, as by donation")
            self._arrays[name] = array
        self.tensors = {
            name: TensorInfo(name, np.dtype(array.dtype), tuple(array.shape), 0, array.nbytes)
            for name, array in self._arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A copy on the host, which later changes of the array do not reach."""
        return np.array(self._arrays[name])

    def same_bytes(self, first: str, second: str) -> bool:
        bits = lambda name: self.read(name).reshape(-1).view(np.uint8)
        return self._alike(first, second) and np.array_equal(bits(first), bits(second))


class Checkpoint(Headers):
    """All tensors of a folder, mapped: `tensors` (the headers), `read(name)` (the contents).

    `files` are those that were read, `file_of[name]` is the one that holds a tensor.

    Files that count: `file` if it is given, else those the index names if there is one, else
    `model.safetensors`, else the only `*.safetensors`. Other copies of the weights in the folder
    are left alone.
    """

    def __init__(self, folder: str | os.PathLike, file: str | None = None):
        self.folder = Path(folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self.file_of: dict[str, Path] = {}
        self.tensors = {}
        index = self.folder / INDEX
        weight_map = _weight_map(index) if index.is_file() and file is None else None
        self.files = self._files(file) if weight_map is None else self._shards(index, weight_map)
        for path in self.files:
            for name, info in read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is also in {self.file_of[name].name}"
                    )
                self.file_of[name] = path
                self.tensors[name] = info
        if weight_map is not None:
            self._check_agreement(index, weight_map)

    def _check_agreement(self, index: Path, weight_map: dict[str, str]) -> None:
        """The index and the headers of the files it names must say the same.

        Raises:
          CheckpointError: they do not.
        """
        for name, shard in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(f"{index}: says {shard} holds tensor {name!r}; it does not")
            if (found := self.file_of[name].name) != shard:
                raise CheckpointError(
                    f"{index}: says {shard} holds tensor {name!r}; it is in {found}"
                )
        extra = self.tensors.keys() - weight_map.keys()
        if extra:
            name = min(extra)
            raise CheckpointError(
                f"{index}: does not list tensor {name!r} of {self.file_of[name].name}; "
                "download index and files again, together"
            )

    def _files(self, file: str | None) -> list[Path]:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}: no such folder; give a Hugging Face model folder with "
                "config.json and *.safetensors"
            )
        whole = self.folder / (file or "model.safetensors")
        if whole.is_file():
            return [whole]
        if file is not None:
            raise CheckpointError(f"{self.folder}: holds no {file}")
        # A pipe by such a name would be waited for without end.
        files = sorted(path for path in self.folder.glob("*.safetensors") if path.is_file())
        if len(files) == 1:
            return files
        if not files and any(self.folder.glob("*.bin")):
            raise CheckpointError(
                f"{self.folder}: holds *.bin, which can run code when PyTorch reads it, and no "
                "*.safetensors; let transformers save the model again with save_pretrained"
            )
        present = f"{len(files)} *.safetensors files and" if files else "no *.safetensors file,"
        raise CheckpointError(
            f"{self.folder}: holds {present} no model.safetensors or {INDEX} to say which to read"
        )

    def _shards(self, index: Path, weight_map: dict[str, str]) -> list[Path]:
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index}: names {shard!r}, not a file beside it")
            if not (self.folder / shard).is_file():
                raise CheckpointError(f"{index}: names {shard}, which is missing")
        return [self.folder / shard for shard in shards]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the tensor's bytes.

        Raises:
          CheckpointError: no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        path, info = self.file_of[name], self.tensors[name]
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = (info.end - info.begin) // info.dtype.itemsize
        flat = np.frombuffer(self._maps[path], info.dtype, count, info.begin)
        return flat.reshape(info.shape)

    def same_bytes(self, first: str, second: str) -> bool:
        if not self._alike(first, second):
            return False
        # Explicit reads: the mapped pages of two embeddings would count as resident memory.
        with self.file_of[first].open("rb") as one, self.file_of[second].open("rb") as other:
            one.seek(self.info(first).begin)
            other.seek(self.info(second).begin)
            left = self.info(first).end - self.info(first).begin
            while left:
                block = one.read(min(_COMPARED_BYTES, left))
                if not block or block != other.read(len(block)):
                    return False
                left -= len(block)
        return True


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one file, tensors in the given order. Atomic rename: the target may be
    memory-mapped."""
    headers = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_streamed(path, headers, tensors.values())


def write_streamed(
    path: Path,
    headers: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> int:
    """`write` for arrays that are made one by one, in the order of `headers`. Returns their
    bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in headers.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    unfinished.replace(path)
    return offset
