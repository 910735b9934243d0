"""Reference of RMSNorm and the residual sum before it: computed in float32, stored in the dtype of
h or another, see `activations.rounded`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.activations import rounded


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return rounded(normed * scale.astype(jnp.float32), out_dtype or x.dtype)


def add_rms_norm(
    h: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    eps: float,
    weights: jax.Array | None,
    rows: jax.Array | None,
    bias: jax.Array | None,
    inner: tuple[jax.Array, float] | None,
    factor: jax.Array | None,
    out_dtypes: Sequence[jnp.dtype],
) -> tuple[jax.Array, ...]:
    if rows is not None:
        R = h.size // h.shape[-1]
        delta = delta[rows[:, :R]].astype(jnp.float32) * weights[:, :R, None]
        delta = delta.reshape(-1, *h.shape)
    total = _total(h, delta)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    if inner is not None:
        total = rms_norm(total.astype(h.dtype), *inner).astype(jnp.float32)
    h = (h.astype(jnp.float32) + total).astype(h.dtype)
    if factor is not None:
        h = (h.astype(jnp.float32) * factor.astype(jnp.float32)).astype(h.dtype)
    return h, *(rms_norm(h, scale, eps, dtype) for dtype in out_dtypes)


def _total(h: jax.Array, delta: jax.Array) -> jax.Array:
    """Sum of the parts in ascending order, float32 [..., D]. A reduction has no fixed order."""
    if delta.ndim == h.ndim:
        return delta.astype(jnp.float32)
    parts = [part.astype(jnp.float32) for part in delta]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
