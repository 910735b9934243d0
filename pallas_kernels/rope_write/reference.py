"""Reference of the steps between the q/k/v projection and attention, one by one."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.activations import rounded
from pallas_kernels.rms_norm.reference import rms_norm


@dataclass(frozen=True, kw_only=True)
class Form:
    """Column layout of a projection: N heads of q, then K of k, then K of v.

    Attributes:
      num_heads: N. K and the head dim H are those of the cache.
      eps: epsilon of the norms.
      shared_kv: the projection has no columns for v; v is k before its norm.
      value_norm: v is normed too, without a weight.
      ring: the page table is a ring, see `write_kv`.
      dtype: dtype of q, and of k and v before the cache write; None: the dtype of the pages.
    """

    num_heads: int
    eps: float = 1e-6
    shared_kv: bool = False
    value_norm: bool = False
    ring: bool = False
    dtype: jnp.dtype | None = None

    def width(self, num_kv_heads: int, head_dim: int) -> int:
        """Columns of the projection."""
        return (self.num_heads + (1 if self.shared_kv else 2) * num_kv_heads) * head_dim


def rope_write(
    qkv: jax.Array,  # [B, T, width] or [parts, B, T, width]
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    angles: tuple[jax.Array, jax.Array],  # each [B, T, H / 2]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    form: Form,
    norms: tuple[jax.Array, jax.Array] | None,  # of q and of k, each [H]
    bias: jax.Array | None,  # [width]
    dtype: jnp.dtype,  # of q, and of the numbers that are converted for the pages
) -> tuple[jax.Array, jax.Array, jax.Array]:
    N, (K, H) = form.num_heads, k_pages.shape[2:]
    heads = _projected(qkv, bias, dtype).reshape(*qkv.shape[-3:-1], -1, H)
    q, k = heads[..., :N, :], heads[..., N : N + K, :]
    v = k if form.shared_kv else heads[..., N + K :, :]
    is_finite = jnp.isfinite(v)
    if norms is not None:
        q, k = rms_norm(q, norms[0], form.eps), rms_norm(k, norms[1], form.eps)
    if form.value_norm:
        v = rms_norm(v, jnp.ones(H, v.dtype), form.eps)
    q, k = apply_rope(q, angles), apply_rope(k, angles)
    k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(jnp.isfinite(v), v, 0)
    return q, *write_kv(k_pages, v_pages, k, v, page_table, positions, form.ring)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates halves (NeoX layout) of x [..., T, N, H]; float32 inside."""
    cos, sin = (a[..., None, :] for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _projected(qkv: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """[B, T, width]: adds the parts in ascending order, then the bias, then rounds once."""
    total, *others = qkv if qkv.ndim == 4 else [qkv]
    for part in others:
        total = total + part
    if bias is not None:
        total = total + bias.astype(total.dtype)
    return total.astype(dtype)


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    ring: bool,
) -> tuple[jax.Array, jax.Array]:
    """Stores row (b, t) at position `positions[b, t]` of sequence b: one scatter, in place if
    donated.

    A position past the page table, or one whose entry is 0, is written to page 0, a dummy page that
    is never read. With Z = 4 and a page table row [7, 3], position 5 is slot 1 of page 3.

    Args:
      k_pages, v_pages: [P, Z, K, H] pages of one layer; float8_e4m3fn saturates.
      k, v: [B, T, K, H] new rows.
      page_table: [B, W] int32, the page of each Z positions.
      positions: [B, T] int32.
      ring: position p is in column (p // Z) % W, so no position is past the table.
    Returns:
      The two updated page arrays.
    """
    page_size = k_pages.shape[1]
    column = positions // page_size
    if ring:
        column = column % page_table.shape[1]
    inside = column < page_table.shape[1]
    page = jnp.take_along_axis(page_table, jnp.where(inside, column, 0), axis=1)
    page = jnp.where(inside, page, 0)
    offset = positions % page_size
    return (
        k_pages.at[page, offset].set(rounded(k, k_pages.dtype)),
        v_pages.at[page, offset].set(rounded(v, v_pages.dtype)),
    )
