"""Targets whose products with fp8 weights quantise their activations
(`pallas_kernels.activations`)."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import formats
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.models.weight_order import quantized_weights


def with_activations(model: nnx.Module, config: EngineConfig) -> nnx.Module:
    """A copy of `model`, with the same weights, that reads activations as `config.activations`
    says.

    Raises:
      ConfigError: no weight has a format for these activations.
    """
    if config.activations == "bf16":
        return model
    copy = jax.tree.map(lambda leaf: leaf, model)
    if not any(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(model)):
        raise ConfigError(
            f"activations={config.activations} is for fp8 weights, and the target has none; leave "
            "it out, or load a checkpoint in FP8 or with quantization=fp8"
        )
    if any(formats.kind(*weight) == "fp8_tiles" for _, weight in quantized_weights(copy)):
        raise ConfigError(
            "activations=fp8 reads fp8 weights in the order of checkpoints, and those of the "
            "target are in tiles; load the target again with activations='fp8'"
        )
    for _, module in nnx.iter_modules(copy):
        if hasattr(module, "activations"):
            module.activations = config.activations
    return copy
