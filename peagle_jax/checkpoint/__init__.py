"""Hugging Face folders <-> models: `load_target`, `load_head`, `save_target`, `save_head`.

Names are imported lazily, so that config.json can be read without importing jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle_jax.checkpoint.loader import (
        Quantization,
        load_head,
        load_target,
        save_head,
        save_speculators_head,
        save_target,
    )
    from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError
    from peagle_jax.checkpoint.target_json import target_config

_HOMES = {
    "Checkpoint": "safetensors",
    "CheckpointError": "safetensors",
    "Quantization": "loader",
    "load_head": "loader",
    "load_target": "loader",
    "save_head": "loader",
    "save_speculators_head": "loader",
    "save_target": "loader",
    "target_config": "target_json",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Quantization",
    "load_head",
    "load_target",
    "save_head",
    "save_speculators_head",
    "save_target",
    "target_config",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
