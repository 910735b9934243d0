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


_UNSET = (
    *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
    *("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "lora_ga_config"),
    *("layers_to_transform", "megatron_config", "modules_to_save", "monteclora_config", "revision"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
)
_FALSE = (
    *("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"),
)
_GIVEN = dict(
    peft_type="LORA",
    peft_version="0.21.2",
    task_type="CAUSAL_LM",
    base_model_name_or_path="base",
    target_modules=["q_proj", "k_proj"],
    inference_mode=True,
    init_lora_weights=True,
    lora_alpha=2,
    lora_dropout=0.1,
    bias="none",
    alpha_pattern={},
    rank_pattern={},
    loftq_config={},
    megatron_core="megatron.core",
    qalora_group_size=16,
)
"""With `_UNSET` and `_FALSE` all keys of adapter_config.json that peft 0.21.2 writes."""


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
    known = dict.fromkeys(_UNSET) | dict.fromkeys(_FALSE, False) | _GIVEN
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
