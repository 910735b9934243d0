"""Linear layers: tokens times a weight [N, K] with K contiguous."""

import jax
import jax.numpy as jnp

from pallas_kernels import column_tiles, dispatch, formats
from pallas_kernels.activations import (
    Activations,
    are_quantized,
    dtype_refusal,
    result_dtype,
    rounding,
)
from pallas_kernels.block_gemm import reference

TILES_CHIPS = (90,)
"""Generations whose products read fp8 weights in tiles (`pallas_kernels.fp8_tiles`)."""
CHIPS_OF = {"fp8_tiles": TILES_CHIPS}
"""Generations with a kernel for weights of a kind, where they are not all."""


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    activations: Activations = "bf16",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T + bias`.

    Args:
      x: [..., K] activations.
      weight: [N, K], its `column_tiles` [N / 64, K, 64], or the values of a quantised weight
        (`pallas_kernels.formats`): fp8 [N, K], mxfp4 [N, K / 2]. The product is computed in
        `x.dtype`, which is float16 for fp8 weights in tiles where `row_dtype` says so.
      scale: scale of a quantised weight; None for a plain one.
      bias: [N] or None.
      out_dtype: dtype of the result, default `result_dtype(x.dtype)`; float32 returns the unrounded
        accumulator.
      activations: "fp8" quantises x for an fp8 weight (`pallas_kernels.activations`); its products
        are then of e4m3. Other weights are multiplied as with "bf16".
    Returns:
      [..., N].
    Raises:
      ValueError: the inner widths differ, or weight and scale match no format.
    """
    if column_tiles.is_tiled(weight, scale):
        shape = column_tiles.logical_shape(weight.shape)
    else:
        shape = formats.logical_shape(weight, scale)
    if len(shape) != 2:
        raise ValueError(f"a linear layer's weight has two axes: {weight.shape=}")
    N, K = shape
    if x.shape[-1] != K:
        raise ValueError(f"inner widths differ: {x.shape=} weight [{N}, {K}]")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"{bias.shape=} must be ({N},), the rows of the weight")
    out_dtype = jnp.dtype(out_dtype or result_dtype(x.dtype))
    round_rows = rounding(activations, weight, scale)
    launch = _launch(x, weight, scale, implementation)
    if launch is None:
        rows, quantized = (x, False) if round_rows is None else (round_rows(x), True)
        return reference.linear(rows, weight, scale, bias, out_dtype, in_blocks=quantized)
    quantized = are_quantized(activations, weight, scale)
    parts = _kernel(x, weight, scale, quantized, launch)
    y = add_in_order(parts)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(out_dtype)


def partial_products(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    activations: Activations = "bf16",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T` as partial sums of a K-split; the consumer adds them in ascending order.

    Arguments as in `linear`.

    Returns:
      float32 [parts, ..., N]; how many parts depends on the shapes, the reference has one.
    """
    round_rows = rounding(activations, weight, scale)
    launch = _launch(x, weight, scale, implementation)
    if launch is None:
        rows, quantized = (x, False) if round_rows is None else (round_rows(x), True)
        float32 = jnp.dtype(jnp.float32)
        return reference.linear(rows, weight, scale, None, float32, in_blocks=quantized)[None]
    return _kernel(x, weight, scale, are_quantized(activations, weight, scale), launch)


def add_in_order(parts: jax.Array) -> jax.Array:
    """[parts, ...] -> [...], `((p0 + p1) + p2) + ...`: a fixed order, independent of the number of
    rows."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _launch(x, weight, scale, implementation) -> dispatch.Launch | None:
    refusal = dtype_refusal(x.dtype, weight, scale) or formats.kernel_refusal(weight, scale)
    if implementation is None:
        refusal = refusal or formats.compile_refusal(weight, scale)
    chips = CHIPS_OF.get(formats.kind(weight, scale), dispatch.CHIPS)
    return dispatch.resolve("block_gemm", implementation, chips=chips, refusal=refusal)


def _kernel(x, weight, scale, quantized: bool, launch: dispatch.Launch) -> jax.Array:
    # Slow imports that CPU use does not need.
    from pallas_kernels.block_gemm import mosaic_gpu
    from pallas_kernels.quantize.mosaic_gpu import operand

    *rows, K = x.shape
    R = x.size // K
    x, x_scale = operand(x.reshape(R, K), quantized, launch)
    N, kind = formats.logical_shape(weight, scale)[0], formats.kind(weight, scale)
    config = mosaic_gpu.TuningConfig.choose(x.shape[0], N, K, launch.device, kind, x.dtype)
    parts = mosaic_gpu.product(x, weight, scale, config, launch, x_scale)
    return parts[:, :R].reshape(parts.shape[0], *rows, -1)
