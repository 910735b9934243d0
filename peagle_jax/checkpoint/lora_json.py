"""`adapter_config.json` of peft: reads it, and refuses adapters that cannot be merged.

Every key that may change the product is known or refused, as those of later versions are.
"""

from pathlib import Path

from peagle_jax.checkpoint.fields import Fields, named, read_json
from peagle_jax.checkpoint.safetensors import CheckpointError

_CONFIG = "adapter_config.json"
_HARMLESS = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("fan_in_fan_out", "init_lora_weights", "lora_dropout", "inference_mode", "task_type"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
        *("megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    }
)
"""Keys that are read, or that change nothing once an adapter is trained."""
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values that leave the weights of the target as they are."""


def read_adapter_config(folder: Path) -> Fields:
    """`adapter_config.json` of a folder; needs no jax.

    Raises:
      CheckpointError: the folder has none, or the adapter is none that can be merged.
    """
    path = Path(folder) / _CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {_CONFIG}; give a folder that peft has saved")
    config = Fields(read_json(path), str(path))
    if (kind := config.get("peft_type")) != "LORA":
        raise config.error(f"peft_type {kind!r} is not supported; LORA is")
    if (bias := config.get("bias", "none")) != "none":
        raise config.error(f"bias {bias!r} is not supported; none is")
    if (init := config.get("init_lora_weights")) not in _INITS:
        raise config.error(
            f"init_lora_weights {init!r} changes the target too; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    other = [key for key, value in config.raw.items() if value and key not in _HARMLESS]
    if other:
        raise config.error(f"{named(other)} cannot be merged")
    return config
