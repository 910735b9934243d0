"""The source of a conversion: a folder of safetensors whose model is recognised."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from peagle_jax.checkpoint.block_json import is_block
from peagle_jax.checkpoint.checked import checked_head, checked_target
from peagle_jax.checkpoint.converted import Converted
from peagle_jax.checkpoint.fields import read_config
from peagle_jax.checkpoint.head_json import head_unread_keys
from peagle_jax.checkpoint.layout import Layout
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, Headers
from peagle_jax.checkpoint.tables import head_names
from peagle_jax.checkpoint.target_json import target_config, target_unread_keys
from peagle_jax.checkpoint.values import check_scale
from peagle_jax.config import DrafterConfig, TargetConfig

Kind = Literal["target", "head"]


@dataclass(frozen=True)
class Source:
    """A checkpoint of a recognised model. `label` for messages: the folder's name or the hub id."""

    checkpoint: Checkpoint
    kind: Kind
    config: TargetConfig | DrafterConfig
    layout: Layout
    label: str
    target_folder: Path | None

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def model(self) -> str:
        """A target's family, a head's method."""
        return self.config.method if self.kind == "head" else self.config.family

    @property
    def unread_keys(self) -> list[str]:
        """Keys of config.json that change nothing."""
        return unread_keys(self.checkpoint, read_config(self.folder))

    @cached_property
    def files(self) -> list[dict]:
        """Name, size, time and header of each file: equal ones identify an unchanged source."""
        found = []
        for path in self.checkpoint.files:
            stat, header = path.stat(), read_header_bytes(path)
            found.append(
                {
                    "name": path.name,
                    "size": stat.st_size,
                    "mtime_ns": stat.st_mtime_ns,
                    "header_bytes": len(header),
                    "header_sha256": hashlib.sha256(header).hexdigest(),
                }
            )
        return found

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory of its own; a mapped file would end the process where it was cut.

        Raises:
          CheckpointError: the file ends before (it was cut since its header was read).
        """
        path, info = self.checkpoint.file_of[name], self.checkpoint.tensors[name]
        data = np.fromfile(path, np.uint8, info.end - info.begin, offset=info.begin)
        if data.nbytes < info.end - info.begin:
            raise CheckpointError(f"{path}: ends inside tensor {name!r}")
        return data.view(info.dtype).reshape(info.shape)


def read_header_bytes(path: Path) -> bytes:
    """The first bytes of a safetensors file, up to the tensors' contents."""
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(int.from_bytes(prefix, "little"))


def unread_keys(checkpoint: Headers, raw: dict) -> list[str]:
    """Keys of config.json that change nothing."""
    if not is_head(checkpoint):
        return target_unread_keys(raw)
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    return head_unread_keys(raw, is_block=is_block(names))


def is_head(checkpoint: Headers) -> bool:
    """Whether these are the tensors of an EAGLE-3 or P-EAGLE head."""
    return head_names(checkpoint.tensors)("fc.weight") in checkpoint


def layout_of(
    checkpoint: Checkpoint | Converted, target: Path | None
) -> tuple[Kind, TargetConfig | DrafterConfig, Layout]:
    """(kind, config, layout) of a checkpoint.

    Args:
      target: folder of the target (only config.json is read); needed for a head.
    Raises:
      CheckpointError: the model is not supported, or the tensors contradict its config.
    """
    folder = checkpoint.folder
    if not is_head(checkpoint):
        return "target", *checked_target(folder, checkpoint)
    if target is None:
        raise CheckpointError(
            f"{folder}: this is a draft head, whose layout depends on the target it was made for; "
            "give that model's folder: --target DIR"
        )
    return "head", *checked_head(folder, checkpoint, target_config(target))


def open_source(folder: Path, label: str | None = None, target: Path | None = None) -> Source:
    """Opens a Hugging Face folder and recognises its model. Reads no contents but scales, and an
    lm_head that config.json ties to the embedding.

    Raises:
      CheckpointError: no checkpoint, a broken file, an index that does not fit the files, a scale
        without a value, or as `layout_of`.
    """
    checkpoint = Checkpoint(folder)
    kind, config, layout = layout_of(checkpoint, target)
    label = label or folder.absolute().name
    source = Source(checkpoint, kind, config, layout, label, target if kind == "head" else None)
    for rule in layout.rules:
        for name in rule.names if rule.path[-1] == "scale" else ():
            try:
                check_scale(name, source.read(name))
            except CheckpointError as error:
                raise CheckpointError(f"{folder}: {error}") from error
    return source
