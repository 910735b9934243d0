"""Reference of the paged write: one scatter, in place if the cache is donated."""

import jax
import jax.numpy as jnp


def write_kv(
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    ring: bool,
) -> tuple[jax.Array, jax.Array]:
    page_size = k_pages.shape[1]
    column = positions // page_size
    if ring:
        column = column % page_table.shape[1]
    inside = column < page_table.shape[1]
    page = jnp.take_along_axis(page_table, jnp.where(inside, column, 0), axis=1)
    page = jnp.where(inside, page, 0)
    offset = positions % page_size
    return (
        k_pages.at[page, offset].set(stored(k, k_pages.dtype)),
        v_pages.at[page, offset].set(stored(v, v_pages.dtype)),
    )


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in the dtype of the cache; e4m3 saturates, because a plain conversion gives NaN on overflow."""
    if dtype == jnp.float8_e4m3fn:
        most = float(jnp.finfo(dtype).max)
        x = jnp.minimum(jnp.maximum(x, -most), most)
    return x.astype(dtype)
