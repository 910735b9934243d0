"""The key blocks that one thread block of attention visits, and where they are in the paged cache."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.verify_attention.mosaic_plan import Plan


@dataclasses.dataclass(frozen=True)
class Walk:
    """The key blocks that one thread block visits, numbered as items 0, 1, ... across its splits.

    Attributes:
      table_gmem: page table int32 [B, W].
      b: sequence.
      index: number of the walk, 0 .. walks - 1.
      first_block, last_block: key blocks that any row of the tile sees.
      first_split, last_split: splits of these blocks.
    """

    plan: Plan
    table_gmem: Any
    b: Any
    index: Any
    first_block: Any
    last_block: Any
    first_split: Any
    last_split: Any

    @classmethod
    def of(
        cls, plan: Plan, table_gmem: Any, positions_gmem: Any, b: Any, index: Any, tile: Any
    ) -> "Walk":
        return cls(plan, table_gmem, b, index, *span(plan, positions_gmem, b, tile))

    @property
    def my_first(self):
        """First split of this walk."""
        return self.first_split + self.index

    @property
    def num_splits(self):
        walks = self.plan.config.walks
        return lax.div(self.last_split - self.my_first + walks, walks)

    @property
    def first_item(self):
        plan = self.plan
        skipped = self.first_block - self.first_split * plan.blocks_per_split
        return jnp.where(self.index == 0, skipped, 0)

    def end_item(self, num_splits):
        per = self.plan.blocks_per_split
        is_last = self.my_first + (num_splits - 1) * self.plan.config.walks == self.last_split
        short = jnp.where(is_last, self.last_block - self.last_split * per, per - 1)
        return (num_splits - 1) * per + short + 1

    def block_of(self, item):
        """Index of an item's key block within the sequence."""
        per = self.plan.blocks_per_split
        split = self.my_first + lax.div(item, per) * self.plan.config.walks
        return split * per + lax.rem(item, per)

    def pages_of(self, item) -> tuple[Any, ...]:
        """Page ids of an item's key block, one per TMA copy."""
        plan = self.plan
        start = self.block_of(item) * plan.config.key_block
        cols = [lax.div(start + j * plan.copy_keys, plan.Z) for j in range(plan.copies)]
        if plan.window is None:
            cols = [jnp.minimum(col, plan.W - 1) for col in cols]
        else:
            cols = [lax.rem(col, plan.W) for col in cols]
        return tuple(self.table_gmem[self.b, col] for col in cols)

    def sources(self, item, pages):
        """For each TMA copy of a key block: ((page, rows of the page), keys of the block)."""
        plan, key_block = self.plan, self.plan.config.key_block
        within = lax.rem(self.block_of(item) * key_block, plan.Z) if key_block < plan.Z else 0
        rows = pl.ds(within, plan.copy_keys)
        return [
            ((page, rows), pl.ds(j * plan.copy_keys, plan.copy_keys))
            for j, page in enumerate(pages)
        ]


def span(plan: Plan, positions_gmem: Any, b: Any, tile: Any) -> tuple[Any, Any, Any, Any]:
    """(first, last) key block and (first, last) split that any row of the tile sees."""
    first_query = tile * plan.tile_queries
    last_query = jnp.minimum(first_query + plan.tile_queries, plan.T) - 1
    last_key = positions_gmem[b, last_query]
    if plan.window is None:
        last_key = jnp.minimum(last_key, plan.W * plan.Z - 1)
        first = jnp.int32(0)
    else:
        first_key = jnp.maximum(positions_gmem[b, first_query] - (plan.window - 1), 0)
        first = lax.div(first_key, jnp.int32(plan.config.key_block))
    last = lax.div(last_key, jnp.int32(plan.config.key_block))
    per = jnp.int32(plan.blocks_per_split)
    return first, last, lax.div(first, per), lax.div(last, per)
