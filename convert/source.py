"""The source of a conversion: files, headers and model kind, without reading tensor contents."""

import errno
import hashlib
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from peagle_jax.checkpoint.checked import checked_head, checked_target
from peagle_jax.checkpoint.converted import Converted
from peagle_jax.checkpoint.fields import read_config
from peagle_jax.checkpoint.head_json import head_unread_keys
from peagle_jax.checkpoint.layout import PACKED, Layout
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, TensorInfo
from peagle_jax.checkpoint.tables import head_names
from peagle_jax.checkpoint.target_json import target_config, target_unread_keys
from peagle_jax.checkpoint.values import check_scale
from peagle_jax.config import DrafterConfig, TargetConfig

TARGET_FILES = ("config.json", "generation_config.json")
_NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of `copy_file_range` between file systems that do not support it."""
_COPY_BYTES = 1 << 20
Kind = Literal["target", "head"]


@dataclass(frozen=True)
class SourceFile:
    """One safetensors file. Equal size, modification time and header identify an unchanged file."""

    name: str
    size: int
    mtime_ns: int
    header_bytes: int  # with the 8 bytes of its length
    header_sha256: str


@dataclass(frozen=True)
class Tensors:
    """The tensors of a folder and the files they are in."""

    folder: Path
    infos: dict[str, TensorInfo]
    files: tuple[SourceFile, ...]
    file_of: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(info.end - info.begin for info in self.infos.values())

    @property
    def identity(self) -> list[dict]:
        """Identity of the source files; an unfinished conversion resumes only if it is unchanged."""
        return [asdict(file) for file in self.files]


@dataclass(frozen=True)
class Source:
    """A checkpoint of a recognised model. `label` for messages: the folder's name or the hub id."""

    tensors: Tensors
    kind: Kind
    config: TargetConfig | DrafterConfig
    layout: Layout
    label: str
    target_folder: Path | None

    @property
    def model(self) -> str:
        """A target's family, a head's method."""
        return self.config.method if self.kind == "head" else self.config.family

    @property
    def folders(self) -> list[Path]:
        """All folders that the conversion reads."""
        return [self.tensors.folder, *([self.target_folder] if self.target_folder else [])]

    @property
    def unread_keys(self) -> list[str]:
        """Keys of config.json that change nothing."""
        return unread_keys(self.kind, read_config(self.tensors.folder))

    @property
    def num_parameters(self) -> int:
        """Number of weights; packed bytes count as two."""
        infos = self.tensors.infos
        counts = (
            prod(infos[name].shape) * (2 if infos[name].dtype == PACKED else 1)
            for rule in self.layout.rules
            for name in rule.names
        )
        return sum(counts)


def tensors_of(checkpoint: Checkpoint) -> Tensors:
    """Headers of a folder's safetensors files, and the identity of the files."""
    files = tuple(map(_source_file, checkpoint.files))
    file_of = {name: path.name for name, path in checkpoint.file_of.items()}
    return Tensors(checkpoint.folder, checkpoint.tensors, files, file_of)


def _source_file(path: Path) -> SourceFile:
    stat = path.stat()
    header = read_header_bytes(path)
    digest = hashlib.sha256(header).hexdigest()
    return SourceFile(path.name, stat.st_size, stat.st_mtime_ns, len(header), digest)


def read_header_bytes(path: Path) -> bytes:
    """The first bytes of a safetensors file, up to the tensors' contents."""
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(int.from_bytes(prefix, "little"))


def unread_keys(kind: Kind, raw: dict) -> list[str]:
    """Keys of config.json that change nothing."""
    return head_unread_keys(raw) if kind == "head" else target_unread_keys(raw)


def is_head(infos: Mapping[str, TensorInfo]) -> bool:
    """Whether these are the tensors of an EAGLE-3 or P-EAGLE head."""
    return head_names(infos)("fc.weight") in infos


def layout_of(
    checkpoint: Checkpoint | Converted, folder: Path, target: Path | None
) -> tuple[Kind, TargetConfig | DrafterConfig, Layout]:
    """(kind, config, layout) of a checkpoint, with the config.json of `folder`.

    Args:
      target: folder of the target (only config.json is read); needed for a head.
    Raises:
      CheckpointError: the model is not supported, or the tensors contradict its config.
    """
    if not is_head(checkpoint.tensors):
        return "target", *checked_target(folder, checkpoint)
    if target is None:
        raise CheckpointError(
            f"{folder}: this is a draft head, whose layout depends on the target it was made for; "
            "give that model's folder: --target DIR"
        )
    return "head", *checked_head(folder, checkpoint, target_config(target))


def open_source(folder: Path, label: str | None = None, target: Path | None = None) -> Source:
    """Opens a Hugging Face folder and recognises its model. Reads no contents but scales, and an lm_head
    that config.json ties to the embedding.

    Raises:
      CheckpointError: no checkpoint, a broken file, an index that does not fit the files, a scale without a
        value, or as `layout_of`.
    """
    checkpoint = Checkpoint(folder)
    tensors = tensors_of(checkpoint)
    kind, config, layout = layout_of(checkpoint, folder, target)
    _check_scales(tensors, layout)
    label = label or folder.absolute().name
    return Source(tensors, kind, config, layout, label, target if kind == "head" else None)


def _check_scales(tensors: Tensors, layout: Layout) -> None:
    """Refuses invalid scales before anything is written. Scales are a small part of a file."""
    with closing(Reader(tensors)) as reader:
        for rule in layout.rules:
            for name in rule.names if rule.path[-1] == "scale" else ():
                info = tensors.infos[name]
                data = np.empty(info.end - info.begin, np.uint8)
                reader.read_into(name, 0, memoryview(data))
                try:
                    check_scale(name, data.view(info.dtype))
                except CheckpointError as error:
                    raise CheckpointError(f"{tensors.folder}: {error}") from error


class Reader:
    """Reads byte ranges of tensors; thread-safe. Uses pread: mapped pages would count as resident memory."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._open = {
            file.name: os.open(tensors.folder / file.name, os.O_RDONLY | os.O_CLOEXEC)
            for file in tensors.files
        }

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Fills `out` with the bytes of tensor `name` from `begin` on.

        Raises:
          CheckpointError: the file ends before (it was cut since its header was read).
        """
        source, at = self._place(name, begin)
        while len(out):
            count = os.preadv(source, [out], at)
            if count == 0:
                raise self._ends(name, at)
            out, at = out[count:], at + count

    def copy_to(self, name: str, begin: int, end: int, descriptor: int, offset: int) -> None:
        """Copies bytes `begin` to `end` of tensor `name` to `offset` of another file, in the kernel.

        Raises:
          CheckpointError: as `read_into`.
        """
        source, at = self._place(name, begin)
        left = end - begin
        while left:
            count = _copy(source, at, descriptor, offset, left)
            if count == 0:
                raise self._ends(name, at)
            at, offset, left = at + count, offset + count, left - count

    def _place(self, name: str, begin: int) -> tuple[int, int]:
        return self._open[self._tensors.file_of[name]], self._tensors.infos[name].begin + begin

    def _ends(self, name: str, at: int) -> CheckpointError:
        file = self._tensors.folder / self._tensors.file_of[name]
        return CheckpointError(f"{file}: ends at byte {at}, inside tensor {name!r}")

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def _copy(source: int, at: int, target: int, offset: int, count: int) -> int:
    """Copies up to `count` bytes; 0 at the end of the source."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, count, at, offset)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
    return os.pwrite(target, os.pread(source, min(count, _COPY_BYTES), at), offset)
