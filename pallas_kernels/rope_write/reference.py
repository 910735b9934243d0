"""Reference of the steps between the q/k/v projection and attention, one by one."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import reference as kv_write
from pallas_kernels.norm_quant import reference as norm_quant


def rope_write(
    qkv: jax.Array,  # [B, T, W] or parts [S, B, T, W]
    pages: tuple[jax.Array, jax.Array],  # each [P, Z, K, H]
    angles: tuple[jax.Array, jax.Array],  # each [B, T, H / 2]
    where: tuple[jax.Array, jax.Array, bool],  # page table [B, W], positions [B, T], ring
    num_heads: int,
    norms: tuple[jax.Array | None, jax.Array | None],  # of q and of k, each [H]
    eps: float,
    bias: jax.Array | None,  # [W]
    value: tuple[bool, bool],  # shared_kv, value_norm
    dtype: jnp.dtype,  # of q, and of the numbers that are converted for the pages
) -> tuple[jax.Array, jax.Array, jax.Array]:
    K, H = pages[0].shape[2:]
    shared_kv, value_norm = value
    heads = _projected(qkv, bias, dtype).reshape(*qkv.shape[-3:-1], -1, H)
    q, k = heads[..., :num_heads, :], heads[..., num_heads : num_heads + K, :]
    v = k if shared_kv else heads[..., num_heads + K :, :]
    is_finite = jnp.isfinite(v)
    q, k = (
        x if scale is None else norm_quant.rms_norm(x, scale, eps)
        for x, scale in zip((q, k), norms, strict=True)
    )
    if value_norm:
        v = norm_quant.rms_norm(v, jnp.ones(H, v.dtype), eps)
    q, k = apply_rope(q, angles), apply_rope(k, angles)
    k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(jnp.isfinite(v), v, 0)
    return q, *kv_write.write_kv(*pages, k, v, *where)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates halves (NeoX layout) of x [..., T, N, H]; float32 inside."""
    cos, sin = (a[..., None, :] for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _projected(qkv: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """[B, T, W]: adds the parts in ascending order, then the bias, then rounds once."""
    total, *rest = qkv if qkv.ndim == 4 else [qkv]
    for part in rest:
        total = total + part
    if bias is not None:
        total = total + bias.astype(total.dtype)
    return total.astype(dtype)
