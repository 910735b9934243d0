"""Which expert each item of `tokens` rows goes to, and where each row's results lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Worklist(NamedTuple):
    """Items in ascending order of expert; item i owns rows i * tokens .. of the buffers.

    Attributes:
      experts: int32, meaningless from `num_items` on.
      num_items: int32, in its first entry.
      slots: [R, k] int32: the buffers' row that holds row r's result of its j-th expert.
      sources: [items * tokens] int32: the row of x that each row of the buffers takes; None when
        every item takes the same rows.
      items: the most there can be, known beforehand.
    """

    experts: jax.Array
    num_items: jax.Array
    slots: jax.Array
    sources: jax.Array | None
    items: int


def most_items(R: int, E: int, top_k: int, tokens: int, shared: bool) -> int:
    """Upper bound on the number of items."""
    chosen = min(E, R * top_k)
    return chosen if shared else chosen + (R * top_k - chosen) // tokens


def make_worklist(ids: jax.Array, E: int, tokens: int, shared: bool) -> Worklist:
    """ids [R, k] int32 of distinct experts -> the worklist, in plain jnp.

    With `shared` an item stands for all R <= tokens rows, whether or not they chose its expert.
    """
    R, top_k = ids.shape
    hit = (ids[:, :, None] == jnp.arange(E)).any(1).astype(jnp.int32)  # [R, E]
    count = hit.sum(0)
    tiles = jnp.minimum(count, 1) if shared else -(-count // tokens)
    ends = jnp.cumsum(tiles)
    first = (ends - tiles) * tokens  # [E] the buffers' first row of each expert
    items = jnp.arange(most_items(R, E, top_k, tokens, shared))
    experts = jnp.minimum((ends <= items[:, None]).sum(1), E - 1).astype(jnp.int32)
    row = jnp.arange(R)[:, None]
    if shared:
        return Worklist(experts, ends[-1:], first[ids] + row, None, items.size)
    rank = jnp.cumsum(hit, axis=0) - hit  # rows before this one that chose the expert
    slots = first[ids] + jnp.take_along_axis(rank, ids, axis=1)
    sources = (
        jnp.zeros(items.size * tokens, jnp.int32).at[slots].set(jnp.broadcast_to(row, ids.shape))
    )
    return Worklist(experts, ends[-1:], slots, sources, items.size)
