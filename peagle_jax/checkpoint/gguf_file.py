"""GGUF files: header, metadata and the numbers of tensors; split files, and one inside of a wheel
or zip.

The header is read here and not by the reader of the package `gguf`, which follows lengths and
counts of a damaged file without bounds. That package unpacks the quantised types.
"""

import mmap
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.extras import check_installed

ARCHIVES = (".whl", ".zip")
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
TYPES = (*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Kinds of metadata, as `struct` names them."""
_MAX_ALIGNMENT = 1 << 20  # bytes
_MAX_AXES = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: `shape` is rows first, as numpy has it; `data` are its bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray = field(repr=False)

    def floats(self, index: int | None = None) -> np.ndarray:
        """The numbers, float32 for a quantised type; with `index` only those of that entry of the
        first axis."""
        rows = self.data if index is None else self.data[index]
        shape = self.shape if index is None else self.shape[1:]
        if self.type in FLOATS:
            return rows.view(FLOATS[self.type]).reshape(shape)
        gguf = _library()
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
            flat = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.type])
        return flat.reshape(shape)


@dataclass
class GgufFile:
    """Metadata and tensors of a model, of all parts of a split one."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")


def is_gguf(text: str | Path) -> bool:
    """Whether a path names a GGUF file, or an archive that may hold one."""
    return Path(text).suffix in (".gguf", *ARCHIVES)


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """The model of a file, of all parts of a split one (any of them is named), or of an archive.

    Raises:
      CheckpointError: no GGUF file or a damaged one, a missing part, or a type that is not
        supported.
    """
    with tempfile.TemporaryDirectory(prefix="peagle-gguf-") as folder:
        try:
            is_archive = path.suffix in ARCHIVES
            file = _read_parts(_unpacked(path, Path(folder)) if is_archive else path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        yield file


def _unpacked(archive: Path, folder: Path) -> Path:
    """Writes the GGUF files of an archive into `folder` and returns the first."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [one for one in opened.infolist() if one.filename.endswith(".gguf")]
            for member in members:
                member.filename = Path(member.filename).name  # never out of the folder
                opened.extract(member, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{archive}: not a readable archive ({error})") from error
    files = sorted(folder.glob("*.gguf"))
    if not files or (len(files) > 1 and "-of-" not in files[0].name):
        raise CheckpointError(f"{archive}: holds {len(files)} GGUF models; one is needed")
    return files[0]


def _read_parts(path: Path) -> GgufFile:
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    end = f"-of-{count:05d}.gguf" if isinstance(count, int) else ""
    stem = path.name.removesuffix(end)
    if stem == path.name or not stem[-5:].isdigit():
        raise first.error(f"is one of {count} parts, so its name must end in -00001{end}")
    names = [f"{stem[:-5]}{i + 1:05d}{end}" for i in range(min(count, 100_000))]
    parts = []
    for number, name in enumerate(names):
        if not path.with_name(name).is_file():
            raise first.error(f"part {name} is missing; it must lie beside this one")
        part = _read(path.with_name(name))
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise part.error(f"is not part {number + 1} of {count}, as its name says")
        parts.append(part)
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    total = sum(len(part.tensors) for part in parts)
    stated = parts[0].metadata.get("split.tensors.count", total)
    if not len(tensors) == total == stated:
        raise first.error(f"the parts hold {len(tensors)} different tensors of {stated}")
    return GgufFile(parts[0].path, parts[0].metadata, tensors)


def _library():
    check_installed("gguf", "reading GGUF")
    import gguf

    return gguf


class _Cursor:
    """Reads values from the mapped bytes of a file, never beyond their end."""

    def __init__(self, content: mmap.mmap, where: Path):
        self.content, self.at, self._where = content, 0, where

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {text}")

    @property
    def left(self) -> int:
        return len(self.content) - self.at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise self.error(f"truncated: {size} bytes are needed at byte {self.at}")
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: str) -> int | float | bool:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == "f" else value

    def text(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a text before byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.error(f"metadata of kind {kind} before byte {self.at} is not known")
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            if count * 8 > self.left:  # of each text's length
                raise self.error(f"truncated: a list of {count} texts at byte {self.at}")
            return [self.text() for _ in range(count)]
        if inner not in _SCALARS:
            raise self.error(f"a list of kind {inner} before byte {self.at} is not known")
        letter = _SCALARS[inner]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(letter))))


def _read(path: Path) -> GgufFile:
    """One file. Its tensors are views of the mapped file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported; 2 and 3 are")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in metadata:
            raise cursor.error(f"states {key} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise cursor.error(f"general.alignment {alignment!r} is not a sensible number of bytes")
    start = cursor.at + -cursor.at % alignment
    tensors, end = {}, start
    for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
        tensor, nbytes = _placed(cursor, name, kind, shape, start + offset)
        if offset % alignment or start + offset < end:
            raise cursor.error(f"tensor {name!r} ({kind}) begins within another or between rows")
        if name in tensors:
            raise cursor.error(f"holds tensor {name!r} twice")
        tensors[name], end = tensor, start + offset + nbytes
    return GgufFile(path, metadata, tensors)


def _entry(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    """(name, type, shape, offset) of a tensor."""
    name, axes = cursor.text(), cursor.number("I")
    if axes > _MAX_AXES:
        raise cursor.error(f"tensor {name!r} has {axes} axes")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
    if 0 in shape:
        raise cursor.error(f"tensor {name!r} has the shape {shape}")
    number, offset = cursor.number("I"), cursor.number("Q")
    known = _library().GGMLQuantizationType
    kind = known(number).name if number in set(known) else str(number)
    if kind not in TYPES:
        raise cursor.error(
            f"tensor {name!r} has type {kind}, which is not supported; {', '.join(TYPES)} are"
        )
    return name, kind, shape, offset


def _placed(
    cursor: _Cursor, name: str, kind: str, shape: tuple[int, ...], begin: int
) -> tuple[GgufTensor, int]:
    """The tensor, and its size in bytes."""
    gguf = _library()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    *rows, width = shape or (1,)
    if width % block:
        raise cursor.error(f"tensor {name!r} has rows of {width}, no multiple of {kind}'s {block}")
    row = width // block * size
    nbytes = prod(rows) * row
    if begin + nbytes > len(cursor.content):
        raise cursor.error(
            f"truncated: tensor {name!r} ({kind}) ends at byte {begin + nbytes} of "
            f"{len(cursor.content)}"
        )
    data = np.frombuffer(cursor.content, np.uint8, nbytes, begin).reshape(*rows, row)
    return GgufTensor(name, kind, shape, data), nbytes
