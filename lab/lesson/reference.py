"""References of the ladder's products in jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_gemm.reference import linear


def product(x: jax.Array, values: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x [R, >= K] times values [N, K], bfloat16 or e4m3 with a scale: [R, N] in `x.dtype`."""
    return linear(x[:, : values.shape[-1]], values, scale, None, x.dtype)


def grouped(
    x: jax.Array,  # [items * tokens, >= K]
    values: jax.Array,  # [E, N, K] e4m3
    scale: jax.Array,  # [E, N / 128, K / 128]
    experts: jax.Array,  # [items] int32
    num_items: jax.Array,  # [1] int32
    *,
    tokens: int,
) -> jax.Array:
    """Each item of `tokens` rows times its expert's weight, zero from `num_items` on:
    [items * tokens, N]."""
    items = x.shape[0] // tokens

    def one(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, rows, expert = item
        y = product(rows, values[expert], scale[expert])
        return jnp.where(i < num_items[0], y, 0)

    rows = x.reshape(items, tokens, -1)
    return lax.map(one, (jnp.arange(items), rows, experts[:items])).reshape(items * tokens, -1)
