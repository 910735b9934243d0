"""Fused pass from the q/k/v projection to attention: sum, bias, norms, RoPE, cache write."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.rope_write import reference
from pallas_kernels.rope_write.reference import Form

MAX_PARTS = 32


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
      qkv: [B, T, form.width(K, H)], or float32 partial sums [parts, B, T, width] of a product whose
        columns are split, added in order.
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
        "rope_write", implementation, refusal=_refusal(qkv, k_pages, v_pages, dtype)
    )
    rows = qkv, k_pages, v_pages, angles, page_table, positions
    if launch is None:
        return reference.rope_write(*rows, form, norms, bias, dtype)
    # Imported here: a slow import that CPU use does not need.
    from pallas_kernels.rope_write import mosaic_gpu

    return mosaic_gpu.rope_write(*rows, form, norms, bias, launch)


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
