"""Hugging Face folders <-> models: `load_target`, `load_head`, `save_target`, `save_head`."""

from peagle_jax.checkpoint.loader import (
    Quantization,
    load_head,
    load_target,
    save_head,
    save_target,
)
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError
from peagle_jax.checkpoint.target_json import target_config

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Quantization",
    "load_head",
    "load_target",
    "save_head",
    "save_target",
    "target_config",
]
