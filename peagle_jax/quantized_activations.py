"""Targets whose products with fp8 weights quantise their activations (`pallas_kernels.activations`)."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import ConfigError, EngineConfig


def with_activations(model: nnx.Module, config: EngineConfig) -> nnx.Module:
    """A copy of `model`, with the same weights, that reads activations as `config.activations` says.

    Raises:
      ConfigError: the activations are fp8, and no weight is.
    """
    if config.activations == "bf16":
        return model
    if not any(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(model)):
        raise ConfigError(
            f"activations={config.activations} is for fp8 weights, and the target has none; leave it out, or "
            "load a checkpoint in FP8 or with quantization=fp8"
        )
    copy = jax.tree.map(lambda leaf: leaf, model)
    for _, module in nnx.iter_modules(copy):
        if hasattr(module, "activations"):
            module.activations = config.activations
    return copy
