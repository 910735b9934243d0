"""Fused pass from the q/k/v projection to attention: sum, bias, norms, RoPE, cache write."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.rope_write import reference

MAX_PARTS = 32
CHIPS = (90, 100, 120)
"""Generations (`Device.sm`) with a kernel."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Column layout of a projection: N heads of q, then K of k, then K of v.

    Attributes:
      num_heads: N. K and the head dim H are those of the cache.
      eps: epsilon of the norms.
      shared_kv: the projection has no columns for v; v is k before its norm.
      value_norm: v is normed too, without a weight.
      ring: the page table is a ring, see `reference.write_kv`.
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
    qkv: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    angles: tuple[jax.Array, jax.Array],
    page_table: jax.Array,
    positions: jax.Array,
    form: Form,
    norms: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes q, k and v of new rows and writes k and v to the cache, as `reference.write_kv`
    does.

    A head is rounded to `form.dtype` where separate layers would round: after sum and bias, after
    the norm, and after RoPE, which is computed in float32 on halves.

    V in the cache is always finite: attention multiplies masked values by 0, and 0 * NaN would
    spread one row's NaN to every row that shares the page. A non-finite element of v is stored as
    0, and the same element of k as NaN. Attention masks scores by selection, so exactly the rows
    that see the key become NaN.

    Args:
      qkv: [B, T, form.width(K, H)], or float32 partial sums [S, B, T, width] of a K-split product,
        added by ascending s.
      k_pages, v_pages: [P, Z, K, H] pages of one layer; donate them and they are updated in place.
        for float8_e4m3fn pages, rounded values are saturated.
      angles: float32 cosines and sines, each [B, T, H / 2].
      page_table: [B, W] int32. Page 0 is a dummy page unless the table is a ring: writes to it may
        be dropped.
      positions: [B, T] int32.
      norms: norm weights of the heads of q and of k, both [H].
      bias: [width].
    Returns:
      q [B, T, N, H] in `form.dtype`, and the two updated page arrays.
    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the requested implementation cannot take these arguments here.
    """
    _check(qkv, k_pages, form)
    dtype = jnp.dtype(form.dtype or k_pages.dtype)
    launch = dispatch.resolve(
        "rope_write", implementation, chips=CHIPS, refusal=_refusal(qkv, k_pages, v_pages, dtype)
    )
    where = (page_table, positions, form.ring)
    norms = (None, None) if norms is None else norms
    value = (form.shared_kv, form.value_norm)
    args = (qkv, (k_pages, v_pages), angles, where, form.num_heads, norms, form.eps, bias, value)
    if launch is None:
        return reference.rope_write(*args, dtype)
    # Imported here: a slow import that CPU use does not need.
    from pallas_kernels.rope_write import mosaic_gpu

    return mosaic_gpu.rope_write(*args, launch)


def _check(qkv: jax.Array, k_pages: jax.Array, form: Form) -> None:
    K, H = k_pages.shape[2:]
    wanted = form.width(K, H)
    if qkv.ndim not in (3, 4) or qkv.shape[-1] != wanted:
        raise ValueError(f"{qkv.shape=} must be [B, T, {wanted}] for {form} and {k_pages.shape=}")
    if qkv.ndim == 4 and not 1 <= qkv.shape[0] <= MAX_PARTS:
        raise ValueError(f"{qkv.shape=} has {qkv.shape[0]} parts; at most {MAX_PARTS} are added")


def _refusal(
    qkv: jax.Array, k_pages: jax.Array, v_pages: jax.Array, dtype: jnp.dtype
) -> str | None:
    """Why the kernel does not support these arguments; None if it does."""
    H = k_pages.shape[3]
    if k_pages.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or v_pages.dtype != k_pages.dtype:
        return f"it writes bfloat16 pages or e4m3 ones, not {k_pages.dtype} and {v_pages.dtype}"
    if dtype != jnp.bfloat16:
        return f"it rounds to bfloat16, not {dtype}"
    if qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the projection is {qkv.dtype}, neither bfloat16 nor float32"
    if H not in (64, 128, 256, 512):
        return f"a head dim of {H} is none of 64, 128, 256, 512"
    return None
