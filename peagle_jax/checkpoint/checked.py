"""Config and layout of a checkpoint, with every check that does not read all its weights.

The loader and `peagle-convert` call these two functions, so both refuse the same checkpoints.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.block_json import block_head_config, is_block
from peagle_jax.checkpoint.converted import Converted
from peagle_jax.checkpoint.head_json import drafter_config
from peagle_jax.checkpoint.layout import Layout
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError
from peagle_jax.checkpoint.tables import as_tied, head_layout, head_names, target_layout
from peagle_jax.checkpoint.target_json import target_config, unstated_sizes
from peagle_jax.config import DrafterConfig, TargetConfig


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Prefixes the message of a CheckpointError with the folder, unless it names it already."""
    try:
        yield
    except CheckpointError as error:
        if str(folder) in str(error):
            raise
        raise CheckpointError(f"{folder}: {error}") from error


def checked_target(folder: Path, checkpoint: Checkpoint | Converted) -> tuple[TargetConfig, Layout]:
    """A target's config, and the layout of its parameters in the tensors of `checkpoint`.

    The layout may have missing and left-over tensors; call `Layout.check` to refuse them.

    Raises:
      CheckpointError: the model is not supported, or the tensors contradict its config.
    """
    with naming(folder):
        config = as_tied(target_config(folder), checkpoint)
        _check_flags(checkpoint)
        hint = unstated_sizes(folder)
        try:
            return config, replace(target_layout(config, checkpoint.tensors), hint=hint)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{hint}") from error


def checked_head(
    folder: Path,
    checkpoint: Checkpoint | Converted,
    target: TargetConfig,
    taps: Sequence[int] | None = None,
) -> tuple[DrafterConfig, Layout]:
    """A head's config, and the layout of its parameters in the tensors of `checkpoint`.

    Reads the headers and the contents of `d2t` and `t2d` only.

    Args:
      taps: tap ids that override those of config.json.
    Raises:
      CheckpointError: the head is broken, does not fit `target`, or its tensors contradict its
        config.
    """
    with naming(folder):
        rename = head_names(checkpoint.tensors)
        names = {name.removeprefix("model.") for name in checkpoint.names()}
        if "fc.weight" not in names:
            raise CheckpointError("no fc.weight; this is not an EAGLE-3, P-EAGLE or DFlash head")
        fc = checkpoint.info(rename("fc.weight")).shape
        if len(fc) != 2:
            raise CheckpointError(f"fc.weight has shape {fc}, not two dimensions")
        read = block_head_config if is_block(names) else drafter_config
        config = read(folder, target, names, fc[1], taps)
        layout = head_layout(config, checkpoint.tensors)
        _check_flags(checkpoint)
        _check_d2t(checkpoint, config)
        return config, layout


def _check_flags(checkpoint: Checkpoint | Converted) -> None:
    """Refuses bool tensors with bytes other than 0 and 1: Orbax would not preserve these bytes.

    Raises:
      CheckpointError: names the tensor.
    """
    for name, info in checkpoint.tensors.items():
        if info.dtype == np.bool_ and np.any(checkpoint.read(name).reshape(-1).view(np.uint8) > 1):
            raise CheckpointError(f"{name} is bool but holds bytes other than 0 and 1")


def _check_d2t(checkpoint: Checkpoint | Converted, config: DrafterConfig) -> None:
    """Checks that `d2t` [Vd] holds offsets: target id = draft id + d2t[draft id].

    Some trainers write absolute ids, which may look like valid offsets. `t2d`, the mask [V] of
    target ids with a draft id, distinguishes the two.

    Raises:
      CheckpointError: d2t is missing, or does not hold the offsets of a vocabulary.
    """
    Vd, V = config.draft_vocab_size, config.vocab_size
    rename = head_names(checkpoint.tensors)
    d2t, t2d = rename("d2t"), rename("t2d")
    if d2t not in checkpoint:
        if Vd == V:
            return
        raise CheckpointError(f"the draft vocabulary has {Vd} of {V} tokens but there is no d2t")
    if checkpoint.info(d2t).dtype.kind not in "iu":
        raise CheckpointError(f"{d2t} is {checkpoint.info(d2t).dtype}, not whole numbers")
    offsets = checkpoint.read(d2t).reshape(-1).astype(np.int64)
    if Vd == V and np.array_equal(offsets, np.arange(V)):
        return  # absolute ids of the whole vocabulary
    ids = np.arange(len(offsets)) + offsets
    if len(offsets) != Vd or np.any(np.diff(ids) <= 0) or ids.min() < 0 or ids.max() >= V:
        raise CheckpointError(
            f"d2t must hold {Vd} offsets to ascending target ids below {V}; "
            "absolute ids need 'd2t - arange(len(d2t))'"
        )
    if t2d in checkpoint and not np.array_equal(np.flatnonzero(checkpoint.read(t2d)), ids):
        raise CheckpointError(
            "d2t and t2d name different target ids; d2t must hold offsets, "
            "absolute ids need 'd2t - arange(len(d2t))'"
        )
