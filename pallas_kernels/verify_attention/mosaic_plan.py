"""Tiling of the attention kernels of all chips: row tiles, blocks and splits of keys.

A thread block owns one row tile of one kv head: row r is query r // G, head r % G of the group. Keys come in
blocks of `key_block` keys, and blocks form splits of `split` keys, both at absolute positions. Each
split starts a new softmax (best, total, out): the row maximum, the sum of weights, and the weighted sum
of values. Splits are merged one by one in ascending order. `walks` affects speed only:

  walks = 1   one thread block visits all splits and merges them in registers;
  walks > 1   thread block c visits the splits c, c + walks, ... and stores (best, total, out) of each; a
              second kernel merges them with the same formula in the same order.

So the bits of a row depend neither on other rows nor on the tiling. A masked key contributes exactly 0,
and a fully masked block or split leaves (best, total, out) unchanged.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_RAW = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
"""Shared-memory layout of e4m3 key blocks."""


class Tile(NamedTuple):
    """Row tile of a thread block on one chip.

    Attributes:
      rows: M of the MMA.
      groups: maximum number of warpgroups; each computes 128 output columns.
      layout: register layout of a [rows, n] array.
      swizzled: the MMA reads queries from swizzled shared memory.
      chunk: maximum number of columns of a chunk of `plain_smem`. A kernel loads whole chunks: a slice of the
        columns may start inside a period of the swizzle, because the swizzle tiles of unaligned heads have fewer
        than 8 rows, and Mosaic counts from the start of the slice. It then reads other columns, without an error.
    """

    rows: int
    groups: int
    layout: Any
    swizzled: bool = True
    chunk: int = 128


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tile sizes; only `key_block` and `split` affect the result's bits.

    Attributes:
      key_block: keys of one MMA; depends on the head dim only.
      split: keys of one softmax; a constant.
      stages: pipeline stages (key blocks in flight).
      walks: thread blocks that share the splits of one row tile.
    """

    key_block: int
    split: int
    stages: int
    walks: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one call."""

    B: int  # sequences
    T: int  # queries per sequence
    K: int  # kv heads
    G: int  # query heads per kv head
    H: int  # head dim
    Z: int  # tokens per page
    W: int  # pages per sequence
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    fp8: bool
    config: TuningConfig
    tile: Tile

    @property
    def N(self) -> int:
        return self.K * self.G

    @property
    def tile_queries(self) -> int:
        """Queries in one row tile."""
        return min(self.T, self.tile.rows // self.G)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.T, self.tile_queries)

    @property
    def tile_rows(self) -> int:
        return self.tile_queries * self.G

    @property
    def columns(self) -> int:
        """Output columns per warpgroup."""
        return min(self.H, 128)

    @property
    def chunk(self) -> int:
        """Columns of a chunk of `plain_smem`; divides `columns`."""
        return min(self.columns, self.tile.chunk)

    @property
    def groups(self) -> int:
        """Warpgroups per thread block: each computes all scores and its own output columns."""
        return min(self.tile.groups, self.H // self.columns)

    @property
    def shares(self) -> int:
        """Thread blocks that divide the output columns of one row tile."""
        return self.H // (self.columns * self.groups)

    @property
    def merges_inside(self) -> bool:
        return self.config.walks == 1

    @property
    def blocks_per_split(self) -> int:
        return self.config.split // self.config.key_block

    @property
    def copy_keys(self) -> int:
        """Keys per TMA copy: one page, or a key block if pages are larger."""
        return min(self.Z, self.config.key_block)

    @property
    def copies(self) -> int:
        return self.config.key_block // self.copy_keys

    @property
    def v_tiling(self) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """Shared-memory layout of V; an MMA over 32 keys needs a 64-byte swizzle."""
        width = min(64, self.config.key_block)
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)

    def slots(self, width: tuple[int, ...], transforms) -> list[Any]:
        """Slots of key blocks [stages, *, key_block, width]; for e4m3 pages also one bfloat16 buffer."""
        *leading, width = width
        shape = (*leading, self.config.key_block, width)
        wide = plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
        slots = (self.config.stages, *shape)
        if not self.fp8:
            return [plgpu.SMEM(slots, jnp.bfloat16, transforms=transforms)]
        return [plgpu.SMEM(slots, jnp.float8_e4m3fn, transforms=_RAW), wide]

    @property
    def aligned(self) -> bool:
        """Whether queries and results pass through swizzled tiles, of which the G rows fill whole ones (8)."""
        return self.tile.swizzled and self.G % 8 == 0

    @property
    def max_splits(self) -> int:
        return _max_splits(self.config.split, self.W * self.Z, self.window, self.tile_queries)


def _max_splits(split: int, table_size: int, window: int | None, queries: int) -> int:
    if window is None:
        return pl.cdiv(table_size, split)
    return pl.cdiv(window + queries - 2, split) + 1


def choose_walks(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    tile: Tile,
    room: int,
) -> int:
    """`walks` for q of `shape` [B, T, N, H]; `room` is the number of resident thread blocks of the chip."""
    B, T, N, H = shape
    G = N // kv_heads
    queries = min(T, tile.rows // G)
    blocks = B * kv_heads * pl.cdiv(T, queries)
    splits = _max_splits(256, table_size, window, queries)
    # The merge is a second kernel: it pays off only with many splits and idle SMs.
    if splits <= 2 or 8 * blocks >= 3 * room or not _can_store_splits(G, H):
        return 1
    # Blocks run in waves of `room`. A wave takes as long as its longest walk, and the start of one takes
    # about as long as a split.
    cost = lambda walks: pl.cdiv(blocks * walks, room) * (pl.cdiv(splits, walks) + 1)
    return min(range(1, splits + 1), key=cost)


def _can_store_splits(group: int, head_dim: int) -> bool:
    """The merge kernel handles 128 columns at a time: with H = 64, two heads of one query."""
    return head_dim % 128 == 0 or group % (128 // head_dim) == 0


def make_plan(q, k_pages, table, tile: Tile, config: TuningConfig, **options) -> Plan:
    """Plan of a call from the shapes; options: scale, window, soft_cap and has_sinks.

    Raises:
      ValueError: `config` has several walks, whose splits the merge kernel cannot read.
    """
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    fp8 = k_pages.dtype == jnp.float8_e4m3fn
    if config.walks > 1 and not _can_store_splits(N // K, H):
        raise ValueError(
            f"{config.walks=} must be 1 for a head dim of {H} and {N // K} query heads per kv head: "
            f"the merge kernel takes {128 // H} heads of one query at a time"
        )
    return Plan(
        B=B, T=T, K=K, G=N // K, H=H, Z=Z, W=table.shape[1], fp8=fp8, config=config, tile=tile,
        **options,
    )  # fmt: skip


def result_type(plan: Plan):
    """Result of the walk kernel: rows, or (parts, stats) of each split; stats are (best, total).

    Parts have the `tile_rows` rows of a tile that exist, stats all rows of the MMA.
    """
    if plan.merges_inside:
        return jax.ShapeDtypeStruct((plan.B, plan.T, plan.K, plan.G, plan.H), jnp.bfloat16)
    where = (plan.B, plan.K, plan.tiles, plan.max_splits)
    return (
        jax.ShapeDtypeStruct((*where, plan.tile_rows, plan.H), jnp.float32),
        jax.ShapeDtypeStruct((*where, 2, plan.tile.rows), jnp.float32),
    )
