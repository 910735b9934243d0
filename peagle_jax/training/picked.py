"""Training on some anchors of each text; the others only serve as context.

A text's prompt is not trained, and what repeats its beginning teaches little. So the fresh anchors
are picked first, at random if they are too many. All depths of a text share its anchors.

Letters: B texts of S slots, P anchors picked, A rows, each a row of one of the B texts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Picked(NamedTuple):
    """Anchors of each text."""

    slots: jax.Array  # [B, P] int32, ascending
    columns: jax.Array  # [B, S] int32: where a slot is in `slots`; P if it is not there


def pick(key: jax.Array, valid: jax.Array, weight: jax.Array | float, count: int) -> Picked:
    """Up to `count` anchors of each text, those of the largest weight first, equal ones at random.

    Args:
      valid: [B, S] bool, slots that may be trained; others are picked where a text has too few.
      weight: [B, S], between 0 and 1.
    """
    B, S = valid.shape
    count = min(count, S)
    order = jnp.where(valid, 1.0 + weight, 0.0) + 1e-3 * jax.random.uniform(key, (B, S))
    slots = jnp.sort(jax.lax.top_k(order, count)[1], axis=1).astype(jnp.int32)
    columns = jnp.full((B, S), count, jnp.int32)
    columns = columns.at[jnp.arange(B)[:, None], slots].set(jnp.arange(count, dtype=jnp.int32))
    return Picked(slots, columns)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [A, n, ...] at index [A, m] -> [A, m, ...]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def widened(x: jax.Array, columns: jax.Array, fill: float = 0.0) -> jax.Array:
    """Anchors [A, P, ...] put at their slots: [A, S, ...], `fill` elsewhere. columns: [A, S]."""
    pad = [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2)
    return _take(jnp.pad(x, pad, constant_values=fill), columns)


@jax.custom_vjp
def narrowed(x: jax.Array, slots: jax.Array, columns: jax.Array) -> jax.Array:
    """Slots [A, S, ...] -> those of the anchors, [A, P, ...]. The gradient is a gather, too."""
    return _take(x, slots)


narrowed.defvjp(
    lambda x, slots, columns: (_take(x, slots), columns),
    lambda columns, g: (widened(g, columns), None, None),
)
