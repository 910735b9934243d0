"""Common part of the attention kernels of all chips: tiling of rows, splits of keys, and the merge.

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
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MASKED = -1e30
# Initial row maximum: above MASKED, so that exp2(MASKED - NOTHING) is exactly 0.
NOTHING = -1e29
LOG2E = math.log2(math.e)
_MERGE_UNROLL = 4
_WIDEN_COLUMNS = 64
# Register layout of the e4m3 conversion: a warp holds 8 rows of 16 elements, 4 per thread.
_WIDENING = plgpu.Layout.TILED(plgpu.Tiling(((32, 16), (8, 16), (4,))), (-5,), (-3, -2), -1)
_RAW = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))


class Tile(NamedTuple):
    """Row tile of a thread block on one chip.

    Attributes:
      rows: M of the MMA.
      groups: maximum number of warpgroups; each computes 128 output columns.
      layout: register layout of a [rows, n] array.
    """

    rows: int
    groups: int
    layout: Any


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
        """Whether the G rows of a query fill whole swizzle tiles of 8 rows."""
        return self.G % 8 == 0

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
    return min(splits, pl.cdiv(room, blocks))


def _can_store_splits(group: int, head_dim: int) -> bool:
    """The merge kernel handles 128 columns at a time: with H = 64, two heads of one query."""
    return head_dim % 128 == 0 or group % (128 // head_dim) == 0


def attend(plan: Plan, walk_kernel, interpret, q, *operands) -> jax.Array:
    """Runs `walk_kernel(plan, interpret)` and, if needed, the merge kernel.

    Args:
      q: [B, T, N, H].
      operands: k_pages, v_pages, page table, positions, and sinks or None.
    Returns:
      [B, T, N, H].
    """
    k_pages, v_pages, table, positions, sinks = operands
    table, positions = (x.astype(jnp.int32) for x in (table, positions))
    grouped = q.reshape(plan.B, plan.T, plan.K, plan.G, plan.H)
    sinks = () if sinks is None else (sinks,)
    operands = (grouped, k_pages, v_pages, table, positions, *sinks)
    if plan.merges_inside:
        out = walk_kernel(plan, interpret)(*operands)
    else:
        parts, stats = walk_kernel(plan, interpret)(*operands)
        parts = parts.reshape(*parts.shape[:-2], plan.tile.rows * plan.H)
        out = _merge_kernel(plan, interpret)(parts, stats, positions, *sinks)
    return out.reshape(q.shape)


def make_plan(q, k_pages, table, tile: Tile, config: TuningConfig, **options) -> Plan:
    """Plan of a call from the shapes; options: scale, window, soft_cap and has_sinks."""
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    fp8 = k_pages.dtype == jnp.float8_e4m3fn
    return Plan(
        B=B, T=T, K=K, G=N // K, H=H, Z=Z, W=table.shape[1], fp8=fp8, config=config, tile=tile,
        **options,
    )  # fmt: skip


def result_type(plan: Plan):
    """Result of the walk kernel: rows, or (parts, stats) of each split; stats are (best, total)."""
    if plan.merges_inside:
        return jax.ShapeDtypeStruct((plan.B, plan.T, plan.K, plan.G, plan.H), jnp.bfloat16)
    where = (plan.B, plan.K, plan.tiles, plan.max_splits)
    return (
        jax.ShapeDtypeStruct((*where, plan.tile.rows, plan.H), jnp.float32),
        jax.ShapeDtypeStruct((*where, 2, plan.tile.rows), jnp.float32),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The key blocks that one thread block visits, numbered as items 0, 1, ... across its splits.

    Attributes:
      table: page table [B, W] in device memory.
      b: sequence.
      index: number of the walk, 0 .. walks - 1.
      first_block, last_block: key blocks that any row of the tile sees.
      first_split, last_split: splits of these blocks.
    """

    plan: Plan
    table: Any
    b: Any
    index: Any
    first_block: Any
    last_block: Any
    first_split: Any
    last_split: Any

    @classmethod
    def of(cls, plan: Plan, table, positions, b, index, tile) -> "Walk":
        return cls(plan, table, b, index, *_span(plan, positions, b, tile))

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
        return tuple(self.table[self.b, col] for col in cols)

    def sources(self, item, pages):
        """For each TMA copy of a key block: ((page, rows of the page), keys of the block)."""
        plan, key_block = self.plan, self.plan.config.key_block
        within = lax.rem(self.block_of(item) * key_block, plan.Z) if key_block < plan.Z else 0
        rows = pl.ds(within, plan.copy_keys)
        return [
            ((page, rows), pl.ds(j * plan.copy_keys, plan.copy_keys))
            for j, page in enumerate(pages)
        ]


def widen(raw_smem, wide_smem) -> None:
    """Converts e4m3 raw_smem [keys, n] to bfloat16 wide_smem [keys, n]; exact."""

    @pl.loop(0, raw_smem.shape[-1] // _WIDEN_COLUMNS)
    def _(i):
        columns = pl.ds(i * _WIDEN_COLUMNS, _WIDEN_COLUMNS)
        # There is no direct conversion from e4m3 to bfloat16.
        numbers = plgpu.load(raw_smem.at[:, columns], layout=_WIDENING, optimized=False)
        wide_smem[:, columns] = numbers.astype(jnp.float32).astype(jnp.bfloat16)

    plgpu.commit_smem()


def masked(plan: Plan, scores: jax.Array, first_key, row_position) -> jax.Array:
    """Scaled and capped scores [rows, keys] in units of log2; MASKED at invisible keys.

    The first column is key `first_key`; a row sees keys up to `row_position` [rows].
    """
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plan.tile.layout)
    key = key + first_key
    limit = lax.broadcast_in_dim(row_position, scores.shape, (0,))
    visible = key <= limit
    if plan.window is not None:
        visible &= key > limit - plan.window
    if plan.soft_cap is None:
        scores = scores * (plan.scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1); the hardware tanh has 11 bits only.
        power = jnp.exp2(scores * (2 * LOG2E * plan.scale / plan.soft_cap))
        scores = plan.soft_cap * LOG2E - (2 * plan.soft_cap * LOG2E) / (power + 1)
    return jnp.where(visible, scores, MASKED)


def sink_values(plan: Plan, sinks, kv) -> jax.Array | None:
    """Sink of each row [rows] in units of log2; None without sinks."""
    if not plan.has_sinks:
        return None
    sink = [sinks[kv * plan.G + g].astype(jnp.float32) * LOG2E for g in range(plan.G)]
    return row_values(plan, 1, sink)


def _span(plan: Plan, positions, b, tile) -> tuple[Any, Any, Any, Any]:
    """(first, last) key block and (first, last) split that any row of the tile sees."""
    first_query = tile * plan.tile_queries
    last_query = jnp.minimum(first_query + plan.tile_queries, plan.T) - 1
    last_key = positions[b, last_query]
    if plan.window is None:
        last_key = jnp.minimum(last_key, plan.W * plan.Z - 1)
        first = jnp.int32(0)
    else:
        first_key = jnp.maximum(positions[b, first_query] - (plan.window - 1), 0)
        first = lax.div(first_key, jnp.int32(plan.config.key_block))
    last = lax.div(last_key, jnp.int32(plan.config.key_block))
    per = jnp.int32(plan.blocks_per_split)
    return first, last, lax.div(first, per), lax.div(last, per)


def merge(running, split, spread):
    """Merges a split into the running (best, total, out); `spread` broadcasts [rows] to out's shape.

    Only the side with the lower maximum is rescaled. Each sum has a single product, which every compiler
    contracts to an FMA. With two products, the two kernels could contract different ones and round apart.
    """
    best, total, out = running
    split_best, split_total, split_out = split
    new_best = jnp.maximum(best, split_best)
    factor = jnp.exp2(jnp.minimum(best, split_best) - new_best)
    grew = split_best > best
    total = jnp.where(grew, total, split_total) * factor + jnp.where(grew, split_total, total)
    grew = spread(split_best) > spread(best)
    out = jnp.where(grew, out, split_out) * spread(factor) + jnp.where(grew, split_out, out)
    return new_best, total, out


def finish(running, sink, spread):
    """Adds the sink (a key without a value; None: no sink) and divides by the softmax denominator."""
    best, total, out = running
    if sink is not None:
        new_best = jnp.maximum(best, sink)
        old = jnp.exp2(best - new_best)
        total = total * old + jnp.exp2(sink - new_best)
        out = out * spread(old)
    return (out / spread(total)).astype(jnp.bfloat16)


def row_values(plan: Plan, repeat: int, values) -> jax.Array:
    """[rows] in registers: row r holds values[(r // repeat) % len(values)]."""
    rows = plan.tile.rows
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plan.tile.layout.reduce(1))
    out = jnp.where(row < rows, values[0], values[0])  # a plain constant has no register layout
    for start in range(repeat, plan.tile_rows, repeat):
        out = jnp.where(row >= start, values[start // repeat % len(values)], out)
    return out


def initial_state(plan: Plan):
    """Initial (best, total, out), before any key."""
    rows, layout = plan.tile.rows, plan.tile.layout
    full = lambda shape, x, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    return (
        full((rows,), NOTHING, layout.reduce(1)),
        full((rows,), 0.0, layout.reduce(1)),
        full((rows, plan.columns), 0.0, layout),
    )


def load_queries(
    plan: Plan, q_gmem, q_smem, plain_smem, ready_barrier, group_barrier, place
) -> None:
    """Loads the rows of one tile into swizzled q_smem; rows past the tile stay uninitialised."""
    b, tile, kv, group = place
    chunks = plan.H // plan.columns

    @pl.when(group == 0)
    def _():
        @pl.loop(0, plan.tile_queries)
        def _(t):
            query = jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
            rows = pl.ds(t * plan.G, plan.G)
            if plan.aligned:
                plgpu.copy_gmem_to_smem(q_gmem.at[b, query, kv], q_smem.at[rows], ready_barrier)
                return
            for i in range(chunks):
                columns = pl.ds(i * plan.columns, plan.columns)
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[b, query, kv, :, columns], plain_smem.at[i, rows], ready_barrier
                )

    plgpu.barrier_wait(ready_barrier)
    if not plan.aligned:
        # TMA cannot write part of an 8-row swizzle tile, so the copy goes through registers.
        @pl.when(group == 0)
        def _():
            for i in range(chunks):
                columns = pl.ds(i * plan.columns, plan.columns)
                q_smem[:, columns] = plgpu.load(
                    plain_smem.at[i], layout=plgpu.Layout.WGMMA, optimized=False
                )
            plgpu.commit_smem()

        plgpu.barrier_arrive(group_barrier)
        plgpu.barrier_wait(group_barrier)


def store_result(plan: Plan, result, out_gmem, out_smem, group_barrier, place) -> None:
    """Stores a finished tile through out_smem, which other warpgroups may still read, to device memory."""
    b, tile, kv, columns = place
    if plan.groups > 1:
        plgpu.barrier_arrive(group_barrier)
        plgpu.barrier_wait(group_barrier)
    out_smem[...] = result
    plgpu.commit_smem()

    first_query = tile * plan.tile_queries

    @pl.loop(0, jnp.minimum(plan.tile_queries, plan.T - first_query))
    def _(t):
        plgpu.copy_smem_to_gmem(
            out_smem.at[pl.ds(t * plan.G, plan.G)], out_gmem.at[b, first_query + t, kv, :, columns]
        )

    plgpu.wait_smem_to_gmem(0)


def _merge_kernel(plan: Plan, interpret):
    """The merge kernel of stored splits: (parts, stats, positions[, sinks]) -> out."""
    heads = max(1, 128 // plan.H)  # heads per thread block
    width = heads * plan.H

    def body(
        parts_gmem,  # [B, K, tiles, splits, rows * H] float32
        stats_gmem,  # [B, K, tiles, splits, 2, rows] float32: best, total
        positions_gmem,  # [B, T] int32
        *refs,  # sinks [N], if any; out bfloat16 [B, T, N * H]
    ):
        sinks_gmem, (out_gmem,) = (refs[0], refs[1:]) if plan.has_sinks else (None, refs)
        b, query, pack = (lax.axis_index(name) for name in ("batch", "query", "pack"))
        kv, g = lax.div(pack * heads, plan.G), lax.rem(pack * heads, plan.G)
        tile = lax.div(query, plan.tile_queries)
        row = lax.rem(query, plan.tile_queries) * plan.G + g
        _, _, first, last = _span(plan, positions_gmem, b, tile)
        layout = plgpu.Layout.WG_STRIDED((width,), width // 128)
        column = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
        constant = lambda x: plgpu.layout_cast(jnp.full((width,), x, jnp.float32), layout)

        def per_head(values):
            """Broadcasts one value per head to the columns of that head."""
            x = constant(values[0])
            for i in range(1, heads):
                x = jnp.where(column >= i * plan.H, values[i], x)
            return x

        def load(split):
            # A split past the last one is loaded as an empty split, which the merge ignores.
            exists, split = split <= last - first, jnp.minimum(split, last - first)
            mask = column < jnp.where(exists, width, 0)
            best, total = (
                per_head(
                    [
                        jnp.where(exists, stats_gmem[b, kv, tile, split, i, row + h], nothing)
                        for h in range(heads)
                    ]
                )
                for i, nothing in enumerate((NOTHING, 0.0))
            )
            out = parts_gmem[b, kv, tile, split, pl.ds(row * plan.H, width)]
            return best, total, jnp.where(mask, plgpu.layout_cast(out, layout), 0.0)

        def some_splits(i, running):
            # Issue all loads before the first merge, to hide their latency.
            for split in [load(i * _MERGE_UNROLL + j) for j in range(_MERGE_UNROLL)]:
                running = merge(running, split, lambda x: x)
            return running

        rounds = lax.div(last - first + _MERGE_UNROLL, _MERGE_UNROLL)
        running = tuple(map(constant, (NOTHING, 0.0, 0.0)))
        running = lax.fori_loop(0, rounds, some_splits, running)
        sink = None
        if plan.has_sinks:
            sink = per_head(
                [sinks_gmem[pack * heads + h].astype(jnp.float32) * LOG2E for h in range(heads)]
            )
        out_gmem[b, query, pl.ds(pack * width, width)] = finish(running, sink, lambda x: x)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.B, plan.T, plan.N * plan.H), jnp.bfloat16),
        grid=(plan.B, plan.T, plan.N // heads),
        grid_names=("batch", "query", "pack"),
        # Safe without barriers: no shared memory, and no ref is both read and written.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
        kernel_name="verify_attention_merge",
    )
