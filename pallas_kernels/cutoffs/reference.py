"""Reference of the cutoffs of top-k and top-p: by a sort."""

import jax
import jax.numpy as jnp


def cutoffs(logits: jax.Array, scale: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """`api.cutoffs` by a sort of each row."""
    V = logits.shape[-1]
    below = jnp.sort(jnp.abs((logits - logits.max(-1, keepdims=True)) * scale[..., None]))
    at = jnp.clip(top_k - 1, 0, V - 1)[..., None]
    found = jnp.take_along_axis(below, at, axis=-1)[..., 0]
    limit = jnp.where((top_k > 0) & (top_k <= V), found, jnp.inf)
    mass = jnp.cumsum(jnp.where(below <= limit[..., None], jnp.exp(-below), 0.0), axis=-1)
    reached = mass >= (top_p * mass[..., -1])[..., None]
    least = jnp.where(reached, below, jnp.inf).min(-1)
    return jnp.where(top_p < 1.0, jnp.minimum(limit, least), limit)
