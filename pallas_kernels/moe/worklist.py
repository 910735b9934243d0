"""Worklist of the grouped GEMM: rows sorted by expert and cut into items of `tokens` rows.

`mosaic_plan` computes the same in a kernel; its module docstring has a worked example.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Worklist(NamedTuple):
    """Items in ascending order of expert; item i is the buffer rows from i * tokens on.

    Attributes:
      experts: int32 [items or more], the expert of each item; unspecified from `num_items` on.
      num_items: int32, the number of items in entry 0.
      slots: int32 [k, R]; slots[j, r] is the buffer row of row r and its j-th expert.
      items: static upper bound of the number of items.
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
    """Builds the worklist in jnp from ids [k, R] int32, which are distinct within a row.

    With `shared` each item contains all R <= tokens rows, also those that did not choose its
    expert.
    """
    top_k, R = ids.shape
    hit = (ids[..., None] == jnp.arange(E)).any(0).astype(jnp.int32)  # [R, E]
    upto = jnp.cumsum(hit, axis=0)  # inclusive: rows up to this one that chose the expert
    count = upto[-1]
    tiles = jnp.minimum(count, 1) if shared else -(-count // tokens)
    ends = jnp.cumsum(tiles)
    first = (ends - tiles) * tokens  # [E] first slot of each expert
    items = most_items(R, E, top_k, tokens, shared)
    experts = (ends[:-1] <= jnp.arange(items)[:, None]).sum(1).astype(jnp.int32)
    row = jnp.arange(R)
    rank = row if shared else upto[row, ids] - 1
    return Worklist(experts, ends[-1:], first[ids] + rank, items)


def own_items(
    work: Worklist, weights: jax.Array, first: jax.Array, count: int, tokens: int
) -> tuple[Worklist, jax.Array]:
    """The items of the experts `first` .. `first + count`, and the weights of their parts; others
    have 0.

    Items are in the order of experts, so those of consecutive experts are adjacent; they move to
    the front. Slots of other experts become the last row of the buffer. These experts do not use
    that row: if there are other items, the items at the front leave the last one free.

    Args:
      weights: [k, R'] float32.
      first: [] int32.
    """
    num_items = work.num_items[0]
    at = jnp.arange(work.experts.shape[0])
    is_item = at < num_items
    begin = (is_item & (work.experts < first)).sum(dtype=jnp.int32)
    end = (is_item & (work.experts < first + count)).sum(dtype=jnp.int32)
    moved = work.experts[jnp.minimum(at + begin, at[-1])] - first
    slots = work.slots - begin * tokens
    is_own = (slots >= 0) & (slots < (end - begin) * tokens)
    slots = jnp.where(is_own, slots, work.items * tokens - 1)
    own = Worklist(
        jnp.clip(moved, 0, count - 1),
        (end - begin)[None],
        slots,
        work.items,
    )
    return own, jnp.where(is_own[:, : weights.shape[1]], weights, 0.0)
