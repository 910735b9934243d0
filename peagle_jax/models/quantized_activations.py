"""Targets whose products quantise their activations (`pallas_kernels.activations`, `pallas_kernels.mxfp8`).

With fp8 activations the weights stay as they are. With mxfp8 activations the quantised weights become mxfp8 too: fp8
weights are rounded again, to e4m3 with a power of two for each row and 32 columns; mxfp4 weights have such scales
already, and their numbers are numbers of e4m3, so they stay exact and take twice the memory. Their columns get zeros
up to whole tiles of 128. Plain weights are not touched.
"""

import logging
import time

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import dispatch, formats, mxfp8
from pallas_kernels.block_gemm.api import MXFP8_CHIPS
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.models.weight_order import quantized_weights

_log = logging.getLogger(__name__)


def with_activations(model: nnx.Module, config: EngineConfig) -> nnx.Module:
    """A copy of `model` that reads activations as `config.activations` says.

    The copy has the same weights. With mxfp8 activations it has its own, unless those of `model` are mxfp8.

    Raises:
      ConfigError: no weight has a format for these activations, or the device has no products for them.
    """
    if config.activations == "bf16":
        return model
    copy = jax.tree.map(lambda leaf: leaf, model)
    if config.activations == "mxfp8":
        requantize(copy)
        return copy
    if not any(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(model)):
        raise ConfigError(
            f"activations={config.activations} is for fp8 weights, and the target has none; leave it out, or "
            "load a checkpoint in FP8 or with quantization=fp8"
        )
    if any(formats.kind(*weight) == "fp8_tiles" for _, weight in quantized_weights(copy)):
        raise ConfigError(
            "activations=fp8 reads fp8 weights in the order of checkpoints, and those of the target are in tiles; give "
            "load_weights the same activations, or call order_weights(target, 'fp8')"
        )
    for _, module in nnx.iter_modules(copy):
        if hasattr(module, "activations"):
            module.activations = config.activations
    return copy


def requantize(model: nnx.Module) -> None:
    """Replaces the fp8 and mxfp4 weights of `model` by mxfp8 ones, one at a time; shapes by shapes.

    The device holds `model` and, for a moment, one weight twice, and of that weight one expert, or all of a dense
    one, in float32.

    Raises:
      ConfigError: `model` has no quantised weights, or the device has no products of mxfp8 weights.
    """
    _check_device(dispatch.device())
    started, kinds = time.perf_counter(), []
    for module, weight in quantized_weights(model):
        kinds.append(formats.kind(*weight))
        if kinds[-1] == "mxfp8":
            continue
        convert = _widened if kinds[-1] == "mxfp4" else _rounded
        is_shape = isinstance(weight[0], jax.ShapeDtypeStruct)
        made = jax.eval_shape(convert, *weight) if is_shape else convert(*weight)
        module.weight, module.scale = map(nnx.Param, jax.block_until_ready(made))
    if not kinds:
        raise ConfigError(
            "activations=mxfp8 is for fp8 and mxfp4 weights, and the target has none; leave it out, or load a "
            "quantised checkpoint or with quantization=fp8"
        )
    if count := len(kinds) - kinds.count("mxfp8"):
        _log.info("%d weights became mxfp8 in %.1f s", count, time.perf_counter() - started)


def _check_device(device) -> None:
    if device.platform == "cpu" or device.sm in MXFP8_CHIPS:
        return
    raise ConfigError(
        f"activations=mxfp8 needs block-scaled products, which data-centre Blackwell has (B200, GB200, B300; sm_100 "
        f"and sm_103) and {device} has not; a CPU runs its reference. Use activations=fp8 or leave it out"
    )


@jax.jit
def _rounded(values: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An fp8 weight [..., N, K], rounded to mxfp8: values [..., N, K'], scale. K' is K in whole tiles."""

    def one(weight):
        wide = formats.dequantize(*weight, jnp.float32)
        values, codes = mxfp8.quantize(_in_tiles(wide))
        return values, mxfp8.pack(codes)

    weight = values, scale
    return one(weight) if values.ndim == 2 else jax.lax.map(one, weight)


@jax.jit
def _widened(values: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An mxfp4 weight [..., N, K] as mxfp8, exact: values [..., N, K'], scale. K' is K in whole tiles."""
    unscaled = formats.dequantize(values, jnp.full_like(scale, mxfp8.ONE), jnp.bfloat16)
    return _in_tiles(unscaled.astype(jnp.float8_e4m3fn)), mxfp8.pack(scale)


def _in_tiles(weight: jax.Array) -> jax.Array:
    return mxfp8.widened(weight, -(-weight.shape[-1] // mxfp8.TILE) * mxfp8.TILE)
