"""The key blocks that one thread block of attention visits, and where they are in the paged
cache."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.verify_attention.mosaic_plan import AttentionPlan, cut


@dataclasses.dataclass(frozen=True)
class Walk(ABC):
    """The key blocks that one thread block visits, numbered as items across its splits.

    Attributes:
      table_gmem: page table int32 [B, W].
      b: sequence.
      index: number of the walk, 0 .. walks - 1.
      first_block, last_block: key blocks that any row of the tile sees.
      first_split, last_split: splits of these blocks.
    """

    plan: AttentionPlan
    table_gmem: Any
    b: Any
    index: Any
    first_block: Any
    last_block: Any
    first_split: Any
    last_split: Any

    @staticmethod
    def of(
        plan: AttentionPlan,
        table_gmem: Any,
        positions_gmem: Any,
        b: Any,
        index: Any,
        tile: Any,
        tiles: int = 1,
    ) -> "Walk":
        """Walk `index` over the keys of `tiles` row tiles from `tile` on."""
        kind = _PartWalk if plan.splits.grow else _StridedWalk
        return kind(plan, table_gmem, b, index, *span(plan, positions_gmem, b, tile, tiles))

    @property
    @abstractmethod
    def num_splits(self) -> Any:
        """Number of splits of this walk; may be 0 or less."""

    @property
    @abstractmethod
    def first_item(self) -> Any:
        """The first item."""

    @abstractmethod
    def end_item(self, num_splits: Any) -> Any:
        """The last item plus 1, of a walk with splits."""

    @abstractmethod
    def split(self, j: Any) -> Any:
        """Number of the walk's split j; the first split that the tile sees is 0."""

    @abstractmethod
    def items_of(self, j: Any, first_item: Any, end_item: Any) -> tuple[Any, Any]:
        """(first item, last item plus 1) of the walk's split j, within the items of the walk."""

    @abstractmethod
    def block_of(self, item: Any) -> Any:
        """Index of an item's key block within the sequence."""

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


class _StridedWalk(Walk):
    """Of equal splits, those of numbers `index`, `index + walks`, ...: the first one is known
    before the positions."""

    @property
    def num_splits(self):
        walks = self.plan.config.walks
        return lax.div(self.last_split - self._first + walks, walks)

    @property
    def first_item(self):
        skipped = self.first_block - self.first_split * self._size
        return jnp.where(self.index == 0, skipped, 0)

    def end_item(self, num_splits):
        size = self._size
        is_last = self._first + (num_splits - 1) * self.plan.config.walks == self.last_split
        short = jnp.where(is_last, self.last_block - self.last_split * size, size - 1)
        return (num_splits - 1) * size + short + 1

    def split(self, j):
        return self._first + j * self.plan.config.walks - self.first_split

    def items_of(self, j, first_item, end_item):
        size = self._size
        return jnp.maximum(j * size, first_item), jnp.minimum((j + 1) * size, end_item)

    def block_of(self, item):
        split = self._first + lax.div(item, self._size) * self.plan.config.walks
        return split * self._size + lax.rem(item, self._size)

    @property
    def _size(self) -> int:
        ((_, size),) = self.plan.splits.steps
        return size

    @property
    def _first(self):
        return self.first_split + self.index


class _PartWalk(Walk):
    """Consecutive splits, about as many keys as the other walks have (`mosaic_plan.cut`). Items are
    key blocks."""

    @property
    def num_splits(self):
        is_last = self.index == self.plan.config.walks - 1
        return jnp.where(is_last, self.last_split + 1, self._cut(self.index + 1)) - self._first

    @property
    def first_item(self):
        return jnp.maximum(self.plan.splits.first_of(self._first), self.first_block)

    def end_item(self, num_splits):
        end = self.plan.splits.first_of(self._first + num_splits)
        return jnp.minimum(end, self.last_block + 1)

    def split(self, j):
        return self._first + j - self.first_split

    def items_of(self, j, first_item, end_item):
        first_of, split = self.plan.splits.first_of, self._first + j
        return jnp.maximum(first_of(split), first_item), jnp.minimum(first_of(split + 1), end_item)

    def block_of(self, item):
        return item

    @property
    def _first(self):
        return self._cut(self.index)

    def _cut(self, index):
        plan = self.plan
        end = self.last_block + 1
        return cut(plan.splits, self.first_block, end, plan.config.walks, index)


def span(
    plan: AttentionPlan, positions_gmem: Any, b: Any, tile: Any, tiles: int = 1
) -> tuple[Any, Any, Any, Any]:
    """(first, last) key block and (first, last) split that any row of `tiles` tiles from `tile` on
    sees."""
    first_query = tile * plan.tile_queries
    last_query = jnp.minimum(first_query + tiles * plan.tile_queries, plan.T) - 1
    last_key = positions_gmem[b, last_query]
    if plan.window is None:
        last_key = jnp.minimum(last_key, plan.W * plan.Z - 1)
        first = jnp.int32(0)
    else:
        first_key = jnp.maximum(positions_gmem[b, first_query] - (plan.window - 1), 0)
        first = lax.div(first_key, jnp.int32(plan.config.key_block))
    last = lax.div(last_key, jnp.int32(plan.config.key_block))
    return first, last, plan.splits.split_of(first), plan.splits.split_of(last)
