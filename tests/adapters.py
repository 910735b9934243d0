"""LoRA adapters in folders, as peft saves them, and targets that are merged by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peagle_jax.checkpoint.safetensors import Checkpoint, write

LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Ends of the names of modules that adapters train."""


def modules_of(folder: Path, ends: Sequence[str] = LINEAR) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of a target's modules, by their names."""
    tensors = Checkpoint(folder).tensors
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    return {name: tensors[f"{name}.weight"].shape for name in names if name.endswith(tuple(ends))}


def save_adapter(
    folder: Path, modules: dict[str, tuple[int, int]], *, rank: int = 4, seed: int = 0, **config
) -> dict[str, np.ndarray]:
    """Writes a random adapter and returns B A [out, in] by module."""
    rng = np.random.default_rng(seed)
    tensors, products = {}, {}
    for name, (rows, columns) in modules.items():
        a = rng.normal(size=(rank, columns)).astype(np.float32)
        b = rng.normal(size=(rows, rank)).astype(np.float32)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        products[name] = b @ a
    save_files(folder, tensors, **{"r": rank} | config)
    return products


def save_files(folder: Path, tensors: dict[str, np.ndarray], **config) -> None:
    """Writes the two files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    known = dict(peft_type="LORA", lora_alpha=2, bias="none", lora_dropout=0.1, use_dora=False)
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    write(folder / "adapter_model.safetensors", tensors)


def save_merged(source: Path, folder: Path, deltas: dict[str, np.ndarray]) -> None:
    """Writes a target with a delta [out, in] added to some of its modules, in float32."""
    checkpoint = Checkpoint(source)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}
    for name, delta in deltas.items():
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (weight.astype(np.float32) + delta).astype(weight.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    write(folder / "model.safetensors", tensors)
