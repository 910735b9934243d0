"""Linear layers: tokens times a weight stored (N, K) with K contiguous."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.block_gemm import reference


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T + bias`.

    Args:
      x: [..., K] activations.
      weight: [N, K], or the values of a quantised weight (`pallas_kernels.formats`): fp8 [N, K],
        mxfp4 [N, K / 2]. It is multiplied in `x.dtype`, whatever its own.
      scale: of a quantised weight; None for a plain one.
      bias: [N] or None.
      out_dtype: of the result, default `x.dtype`; float32 keeps the accumulator unrounded.
    Returns:
      [..., N].
    Raises:
      ValueError: the inner widths differ, or weight and scale are of no format.
    """
    if weight.ndim != 2:
        raise ValueError(f"a linear layer's weight has two axes: {weight.shape=}")
    N, K = formats.logical_shape(weight, scale)
    if x.shape[-1] != K:
        raise ValueError(f"inner widths differ: {x.shape=} weight [{N}, {K}]")
    if bias is not None and bias.shape != (N,):
        raise ValueError(f"{bias.shape=} must be ({N},), the rows of the weight")
    dispatch.resolve("block_gemm", implementation)
    return reference.linear(x, weight, scale, bias, jnp.dtype(out_dtype or x.dtype))
