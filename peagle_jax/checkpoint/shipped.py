"""Heads that the package brings along for released models."""

import hashlib
import json
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.converted import open_checkpoint
from peagle_jax.checkpoint.fields import read_config
from peagle_jax.config import Method

HEADS = Path(__file__).parents[1] / "assets" / "heads"
"""A folder for each target: `target.json`, and the folders of its heads by method."""
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_NORM = "model.norm.weight"


def digest(target: Path) -> str | None:
    """What tells a target: its sizes and its last norm, which no weight format changes; None for
    one whose norm has another name.

    Raises:
      CheckpointError: the folder has no usable config.json, or broken weights.
    """
    config, checkpoint = read_config(target), open_checkpoint(target)
    if _NORM not in checkpoint.tensors:
        return None
    norm = checkpoint.read(_NORM)
    sizes = json.dumps([config.get(name) for name in _SIZES])
    return hashlib.sha256(sizes.encode() + norm.astype(np.float32).tobytes()).hexdigest()


def shipped_heads(target: str | Path) -> dict[Method, Path]:
    """Folders of the heads for a target, by method; none for most targets.

    Raises:
      CheckpointError: as of `digest`.
    """
    own = digest(Path(target))
    for folder in sorted(HEADS.glob("*/target.json")):
        if json.loads(folder.read_text())["digest"] == own:
            return {path.name: path for path in sorted(folder.parent.iterdir()) if path.is_dir()}
    return {}


def has_shipped_heads(hub_id: str) -> bool:
    """Whether the package has heads for the model with this name on the hub."""
    return any(
        hub_id in json.loads(path.read_text())["hub_ids"] for path in HEADS.glob("*/target.json")
    )
