"""Linear layers: tokens times a weight stored (N, K) with K contiguous."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_gemm import reference


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """`x @ weight.T + bias`.

    Args:
      x: [..., K] activations.
      weight: [N, K].
      bias: [N] or None.
      out_dtype: of the result, default `x.dtype`; float32 keeps the accumulator unrounded.
    Returns:
      [..., N].
    Raises:
      ValueError: the inner widths differ.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"inner widths differ: {x.shape=} {weight.shape=}")
    dispatch.resolve("block_gemm", implementation, ())
    return reference.linear(x, weight, bias, out_dtype or x.dtype)
