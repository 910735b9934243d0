"""Which expert each item of `tokens` rows goes to, and where each row's results lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Worklist(NamedTuple):
    """Items in ascending order of expert; item i owns rows i * tokens .. of the buffers.

    Attributes:
      experts: int32, meaningless from `num_items` on.
      num_items: int32, in its first entry.
      slots: [k, R] int32: the buffers' row that holds row r's result of its j-th expert.
      items: the most there can be, known beforehand.
    """

    experts: jax.Array
    num_items: jax.Array
    slots: jax.Array
    items: int


def most_items(R: int, E: int, top_k: int, tokens: int, shared: bool) -> int:
    """Upper bound on the number of items."""
    chosen = min(E, R * top_k)
    return chosen if shared else chosen + (R * top_k - chosen) // tokens


def make_worklist(ids: jax.Array, E: int, tokens: int, shared: bool) -> Worklist:
    """ids [k, R] int32, a row's all distinct -> the worklist, in plain jnp.

    With `shared` an item stands for all R <= tokens rows, whether or not they chose its expert.
    """
    top_k, R = ids.shape
    hit = (ids[..., None] == jnp.arange(E)).any(0).astype(jnp.int32)  # [R, E]
    upto = jnp.cumsum(hit, axis=0)  # this row and those before it that chose the expert
    count = upto[-1]
    tiles = jnp.minimum(count, 1) if shared else -(-count // tokens)
    ends = jnp.cumsum(tiles)
    first = (ends - tiles) * tokens  # [E] the buffers' first row of each expert
    items = most_items(R, E, top_k, tokens, shared)
    experts = (ends[:-1] <= jnp.arange(items)[:, None]).sum(1).astype(jnp.int32)
    row = jnp.arange(R)
    rank = row if shared else upto[row, ids] - 1
    return Worklist(experts, ends[-1:], first[ids] + rank, items)
