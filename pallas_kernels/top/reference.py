"""Reference of the largest values of rows, with their places."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

_FEW = 32_768
"""Most values that `lax.top_k` takes, except on a CPU."""
_DIRECT = 512
"""Most values whose ranks are counted pair by pair."""
_WIDTH = 64
"""Values of a tile that `lax.top_k` ranks by its maximum."""


def top(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """See `api.top`.

    Ranks are counted instead of sorted, since a CUDA graph may not contain a sort: first among
    tiles by their maximum, then inside the best tiles, which hold the largest values.
    """
    values = jnp.where(values == values, values, -jnp.inf)
    # XLA compiles ranks of few thousand values for minutes, and sorts these fast enough; a CPU has
    # no graphs.
    sorts = values.shape[-1] <= _FEW or dispatch.platform() == "cpu"
    ids = _sorted(values, count) if sorts else _counted(values, count)
    return ids, jnp.take_along_axis(values, ids, axis=-1)


def _sorted(values: jax.Array, count: int) -> jax.Array:
    """Indices of the largest of some thousand values, by two sorts of fewer.

    On a CPU one sort of 8,192 values makes the products of the whole round take twice as long (XLA
    of jaxlib 0.11.2).
    """
    if values.shape[-1] <= 2 * count * _WIDTH:
        return jax.lax.top_k(values, count)[1]
    return _in_tiles(values, count, _WIDTH, _sorted)


def _counted(values: jax.Array, count: int) -> jax.Array:
    """Indices of the largest of many values, without a sort."""
    V = values.shape[-1]
    if V <= _DIRECT:
        return _ranked(values, count)
    width = max(count, 1 << math.ceil(math.log2(V / _DIRECT)))
    return _in_tiles(values, count, width, _counted)


def _in_tiles(values: jax.Array, count: int, width: int, largest: Callable) -> jax.Array:
    """Indices of the largest values: `largest` finds the best tiles of `width`, and those within
    them."""
    V = values.shape[-1]
    pad = [(0, 0)] * (values.ndim - 1) + [(0, -V % width)]
    tiles = jnp.pad(values, pad, constant_values=-jnp.inf).reshape(*values.shape[:-1], -1, width)
    best = largest(tiles.max(-1), count)
    # In ascending order, so that equal values keep the order of their indices.
    best = jnp.take_along_axis(best, _ranked(-best.astype(jnp.float32), count), axis=-1)
    inner = jnp.take_along_axis(tiles, best[..., None], axis=-2)
    at = best[..., None] * width + jnp.arange(width)
    flat = lambda x: x.reshape(*x.shape[:-2], count * width)
    chosen = jnp.take_along_axis(flat(at), largest(flat(inner), count), axis=-1)
    return jnp.minimum(chosen, V - 1)  # padding is chosen only where all values are -inf


def _ranked(values: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest of few values: the rank of a value is the number of those
    before it."""
    index = jnp.arange(values.shape[-1])
    mine, other = values[..., :, None], values[..., None, :]
    before = (other > mine) | ((other == mine) & (index < index[:, None]))
    rank = before.sum(-1, dtype=jnp.int32)
    is_rank = rank[..., None, :] == jnp.arange(count)[:, None]
    return jnp.where(is_rank, index, 0).sum(-1, dtype=jnp.int32)
