"""What the attention kernels of all chips share: rows in tiles, keys in splits, and their merge.

One thread block owns the rows of one tile of one kv head: row r is query r // G, head r % G of the
group. Keys come in blocks of `key_block` at absolute positions, and blocks form splits of `split` keys,
also at absolute positions. Every split starts a fresh softmax (best, total, out); splits are merged one
after the other in ascending order. Who merges is a matter of speed only:

  walks = 1   a thread block walks over all splits and merges in registers;
  walks > 1   walk c takes the splits c, c + walks, ... and stores each one's (best, total, out); a
              second kernel merges them with the same formula in the same order.

So the bits of a row depend neither on the other rows, nor on how the work is cut. A masked key
contributes exactly 0 and a masked block or split leaves (best, total, out) as they were.
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
# Best of no key at all: above MASKED, so that exp2(MASKED - NOTHING) is exactly 0.
NOTHING = -1e29
LOG2E = math.log2(math.e)
_MERGE_UNROLL = 4
_WIDEN_COLUMNS = 64
# Eight rows of four times four numbers to a warp.
_WIDENING = plgpu.Layout.TILED(plgpu.Tiling(((32, 16), (8, 16), (4,))), (-5,), (-3, -2), -1)
_RAW = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))


class Tile(NamedTuple):
    """What a chip's matrix instruction makes of the rows of a thread block.

    Attributes:
      rows: M of the instruction.
      groups: most warpgroups that compute, each 128 columns of the output.
      layout: of [rows, n] numbers in registers.
    """

    rows: int
    groups: int
    layout: Any


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the work is cut; no field but `key_block` and `split` can change a bit of the result.

    Attributes:
      key_block: keys of one product; a function of the head dim alone.
      split: keys of one softmax, a constant.
      stages: key blocks in flight.
      walks: thread blocks that share the splits of one row tile.
    """

    key_block: int
    split: int
    stages: int
    walks: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one call."""

    B: int
    T: int
    K: int
    G: int
    H: int
    Z: int
    W: int
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
        """Queries of one row tile."""
        return min(self.T, self.tile.rows // self.G)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.T, self.tile_queries)

    @property
    def tile_rows(self) -> int:
        return self.tile_queries * self.G

    @property
    def columns(self) -> int:
        """Columns of the output that one warpgroup accumulates."""
        return min(self.H, 128)

    @property
    def groups(self) -> int:
        """Warpgroups of a thread block: all compute the scores, each its own output columns."""
        return min(self.tile.groups, self.H // self.columns)

    @property
    def shares(self) -> int:
        """Thread blocks that share the columns of one row tile."""
        return self.H // (self.columns * self.groups)

    @property
    def merges_inside(self) -> bool:
        return self.config.walks == 1

    @property
    def blocks_per_split(self) -> int:
        return self.config.split // self.config.key_block

    @property
    def copy_keys(self) -> int:
        """Keys of one TMA copy: a page, or a key block where pages are larger."""
        return min(self.Z, self.config.key_block)

    @property
    def copies(self) -> int:
        return self.config.key_block // self.copy_keys

    @property
    def v_tiling(self) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """Of V in SMEM: a product over 32 keys wants rows of 64 bytes."""
        width = min(64, self.config.key_block)
        return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)

    def slots(self, width: tuple[int, ...], transforms) -> list[Any]:
        """Shared memory for key blocks as they arrive, and for one as bfloat16 where that differs."""
        *leading, width = width
        shape = (*leading, self.config.key_block, width)
        wide = plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
        slots = (self.config.stages, *shape)
        if not self.fp8:
            return [plgpu.SMEM(slots, jnp.bfloat16, transforms=transforms)]
        return [plgpu.SMEM(slots, jnp.float8_e4m3fn, transforms=_RAW), wide]

    @property
    def aligned(self) -> bool:
        """Whether the heads of one query fill whole swizzle tiles of 8 rows."""
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
    """`walks` for q of `shape` [B, T, N, H], on a chip that holds `room` thread blocks at a time."""
    B, T, N, H = shape
    G = N // kv_heads
    queries = min(T, tile.rows // G)
    blocks = B * kv_heads * pl.cdiv(T, queries)
    splits = _max_splits(256, table_size, window, queries)
    # Storing and merging splits costs a kernel: worth it only if walks are long and SMs are idle.
    if splits <= 2 or 8 * blocks >= 3 * room or not _can_store_splits(G, H):
        return 1
    return min(splits, pl.cdiv(room, blocks))


def _can_store_splits(group: int, head_dim: int) -> bool:
    """The merging kernel takes 128 numbers at a time: with H = 64 two heads of one query."""
    return head_dim % 128 == 0 or group % (128 // head_dim) == 0


def attend(plan: Plan, walk_kernel, interpret, q, *operands) -> jax.Array:
    """Runs `walk_kernel(plan, interpret)` and merges what it leaves: q [B, T, N, H] -> [B, T, N, H].

    operands: pages of keys and values, page table, positions and sinks or None.
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
    """Static facts from shapes; options: scale, window, soft_cap and has_sinks."""
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    fp8 = k_pages.dtype == jnp.float8_e4m3fn
    return Plan(
        B=B, T=T, K=K, G=N // K, H=H, Z=Z, W=table.shape[1], fp8=fp8, config=config, tile=tile,
        **options,
    )  # fmt: skip


def result_type(plan: Plan):
    """What the walking kernel returns: rows, or each split's (parts, stats)."""
    if plan.merges_inside:
        return jax.ShapeDtypeStruct((plan.B, plan.T, plan.K, plan.G, plan.H), jnp.bfloat16)
    where = (plan.B, plan.K, plan.tiles, plan.max_splits)
    return (
        jax.ShapeDtypeStruct((*where, plan.tile.rows, plan.H), jnp.float32),
        jax.ShapeDtypeStruct((*where, 2, plan.tile.rows), jnp.float32),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The key blocks that one thread block visits, as items 0, 1, ... of its own splits."""

    plan: Plan
    table: Any
    b: Any
    number: Any
    first_block: Any
    last_block: Any
    first_split: Any
    last_split: Any

    @classmethod
    def of(cls, plan: Plan, table, positions, b, number, tile) -> "Walk":
        return cls(plan, table, b, number, *_span(plan, positions, b, tile))

    @property
    def my_first(self):
        """The first split of this walk."""
        return self.first_split + self.number

    @property
    def num_splits(self):
        walks = self.plan.config.walks
        return lax.div(self.last_split - self.my_first + walks, walks)

    @property
    def first_item(self):
        plan = self.plan
        skipped = self.first_block - self.first_split * plan.blocks_per_split
        return jnp.where(self.number == 0, skipped, 0)

    def end_item(self, num_splits):
        per = self.plan.blocks_per_split
        is_last = self.my_first + (num_splits - 1) * self.plan.config.walks == self.last_split
        short = jnp.where(is_last, self.last_block - self.last_split * per, per - 1)
        return (num_splits - 1) * per + short + 1

    def block_of(self, item):
        """Number of a key block within the sequence."""
        per = self.plan.blocks_per_split
        split = self.my_first + lax.div(item, per) * self.plan.config.walks
        return split * per + lax.rem(item, per)

    def pages_of(self, item) -> tuple[Any, ...]:
        """Pages of a key block, one for each copy."""
        plan = self.plan
        start = self.block_of(item) * plan.config.key_block
        cols = [lax.div(start + j * plan.copy_keys, plan.Z) for j in range(plan.copies)]
        if plan.window is None:
            cols = [jnp.minimum(col, plan.W - 1) for col in cols]
        else:
            cols = [lax.rem(col, plan.W) for col in cols]
        return tuple(self.table[self.b, col] for col in cols)

    def sources(self, item, pages):
        """(index of page and rows, keys of the block) of each copy that brings a key block."""
        plan, key_block = self.plan, self.plan.config.key_block
        within = lax.rem(self.block_of(item) * key_block, plan.Z) if key_block < plan.Z else 0
        rows = pl.ds(within, plan.copy_keys)
        return [
            ((page, rows), pl.ds(j * plan.copy_keys, plan.copy_keys))
            for j, page in enumerate(pages)
        ]


def widen(raw, wide) -> None:
    """e4m3 in shared memory [keys, n] to bfloat16 there, for products to read: exact."""

    @pl.loop(0, raw.shape[-1] // _WIDEN_COLUMNS)
    def _(i):
        here = pl.ds(i * _WIDEN_COLUMNS, _WIDEN_COLUMNS)
        # There is no direct conversion to bfloat16.
        numbers = plgpu.load(raw.at[:, here], layout=_WIDENING, optimized=False)
        wide[:, here] = numbers.astype(jnp.float32).astype(jnp.bfloat16)

    plgpu.commit_smem()


def masked(plan: Plan, scores: jax.Array, first_key, row_position) -> jax.Array:
    """Scores [rows, keys] from key `first_key` on in units of log2, MASKED where a row must not see."""
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plan.tile.layout)
    key = key + first_key
    limit = lax.broadcast_in_dim(row_position, scores.shape, (0,))
    visible = key <= limit
    if plan.window is not None:
        visible &= key > limit - plan.window
    if plan.soft_cap is None:
        scores = scores * (plan.scale * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1), far closer than the chip's own approximation of tanh.
        power = jnp.exp2(scores * (2 * LOG2E * plan.scale / plan.soft_cap))
        scores = plan.soft_cap * LOG2E - (2 * plan.soft_cap * LOG2E) / (power + 1)
    return jnp.where(visible, scores, MASKED)


def sink_values(plan: Plan, sinks, kv) -> jax.Array | None:
    """Each row's sink in units of log2, None without sinks."""
    if not plan.has_sinks:
        return None
    sink = [sinks[kv * plan.G + g].astype(jnp.float32) * LOG2E for g in range(plan.G)]
    return row_values(plan, 1, sink)


def _span(plan: Plan, positions, b, tile) -> tuple[Any, Any, Any, Any]:
    """First and last key block, first and last split that any row of the tile may see."""
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
    """One more split joins: (best, total, out) twice; `spread` brings a row's number to its columns.

    The side with the lower best shrinks, the other one stays. Each sum holds a single product, which
    every compiler fuses: with two, the kernels that must agree might fuse different ones.
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
    """The sink joins as one more key without a value (None: no sink), then the softmax is divided."""
    best, total, out = running
    if sink is not None:
        new_best = jnp.maximum(best, sink)
        old = jnp.exp2(best - new_best)
        total = total * old + jnp.exp2(sink - new_best)
        out = out * spread(old)
    return (out / spread(total)).astype(jnp.bfloat16)


def row_values(plan: Plan, repeat: int, values) -> jax.Array:
    """Row r -> values[(r // repeat) % len(values)], as a column of the accumulator."""
    rows = plan.tile.rows
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plan.tile.layout.reduce(1))
    out = jnp.where(row < rows, values[0], values[0])  # a constant would have no layout
    for start in range(repeat, plan.tile_rows, repeat):
        out = jnp.where(row >= start, values[start // repeat % len(values)], out)
    return out


def nothing_yet(plan: Plan):
    """(best, total, out) of no key at all."""
    rows, layout = plan.tile.rows, plan.tile.layout
    full = lambda shape, x, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    return (
        full((rows,), NOTHING, layout.reduce(1)),
        full((rows,), 0.0, layout.reduce(1)),
        full((rows, plan.columns), 0.0, layout),
    )


def load_queries(plan: Plan, q, q_s, plain_s, q_ready, together, place) -> None:
    """The rows of one tile into swizzled SMEM; rows that do not exist stay what they were."""
    b, tile, kv, group = place
    chunks = plan.H // plan.columns

    @pl.when(group == 0)
    def _():
        @pl.loop(0, plan.tile_queries)
        def _(t):
            query = jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
            rows = pl.ds(t * plan.G, plan.G)
            if plan.aligned:
                plgpu.copy_gmem_to_smem(q.at[b, query, kv], q_s.at[rows], q_ready)
                return
            for i in range(chunks):
                mine = pl.ds(i * plan.columns, plan.columns)
                plgpu.copy_gmem_to_smem(q.at[b, query, kv, :, mine], plain_s.at[i, rows], q_ready)

    plgpu.barrier_wait(q_ready)
    if not plan.aligned:
        # A copy cannot write part of a swizzle tile, so registers do it.
        @pl.when(group == 0)
        def _():
            for i in range(chunks):
                mine = pl.ds(i * plan.columns, plan.columns)
                q_s[:, mine] = plgpu.load(plain_s.at[i], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()

        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)


def store_result(plan: Plan, result, out, staged, together, place) -> None:
    """A finished tile through SMEM (which the other warpgroups may still read) to memory."""
    b, tile, kv, mine = place
    if plan.groups > 1:
        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)
    staged[...] = result
    plgpu.commit_smem()

    first_query = tile * plan.tile_queries

    @pl.loop(0, jnp.minimum(plan.tile_queries, plan.T - first_query))
    def _(t):
        plgpu.copy_smem_to_gmem(
            staged.at[pl.ds(t * plan.G, plan.G)], out.at[b, first_query + t, kv, :, mine]
        )

    plgpu.wait_smem_to_gmem(0)


def _merge_kernel(plan: Plan, interpret):
    """The kernel that merges stored splits: (parts, stats, positions[, sinks]) -> out."""
    heads = max(1, 128 // plan.H)  # rows of one thread block
    width = heads * plan.H

    def body(parts, stats, positions, *rest):
        sinks, (out,) = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        b, query, pack = (lax.axis_index(name) for name in ("batch", "query", "pack"))
        kv, g = lax.div(pack * heads, plan.G), lax.rem(pack * heads, plan.G)
        tile = lax.div(query, plan.tile_queries)
        row = lax.rem(query, plan.tile_queries) * plan.G + g
        _, _, first, last = _span(plan, positions, b, tile)
        layout = plgpu.Layout.WG_STRIDED((width,), width // 128)
        column = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
        constant = lambda x: plgpu.layout_cast(jnp.full((width,), x, jnp.float32), layout)

        def per_head(values):
            """One number a head, to the columns of that head."""
            x = constant(values[0])
            for i in range(1, heads):
                x = jnp.where(column >= i * plan.H, values[i], x)
            return x

        def load(split):
            # A split past the last one counts as one without keys, which changes nothing.
            exists, split = split <= last - first, jnp.minimum(split, last - first)
            mask = column < jnp.where(exists, width, 0)
            best, total = (
                per_head(
                    [
                        jnp.where(exists, stats[b, kv, tile, split, i, row + h], nothing)
                        for h in range(heads)
                    ]
                )
                for i, nothing in enumerate((NOTHING, 0.0))
            )
            out = parts[b, kv, tile, split, pl.ds(row * plan.H, width)]
            return best, total, jnp.where(mask, plgpu.layout_cast(out, layout), 0.0)

        def some_splits(i, running):
            # All loads are under way before the first is needed.
            for split in [load(i * _MERGE_UNROLL + j) for j in range(_MERGE_UNROLL)]:
                running = merge(running, split, lambda x: x)
            return running

        rounds = lax.div(last - first + _MERGE_UNROLL, _MERGE_UNROLL)
        running = tuple(map(constant, (NOTHING, 0.0, 0.0)))
        running = lax.fori_loop(0, rounds, some_splits, running)
        sink = None
        if plan.has_sinks:
            sink = per_head(
                [sinks[pack * heads + h].astype(jnp.float32) * LOG2E for h in range(heads)]
            )
        out[b, query, pl.ds(pack * width, width)] = finish(running, sink, lambda x: x)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.B, plan.T, plan.N * plan.H), jnp.bfloat16),
        grid=(plan.B, plan.T, plan.N // heads),
        grid_names=("batch", "query", "pack"),
        # Nothing lies in shared memory, and nothing is both read and written.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
        kernel_name="verify_attention_merge",
    )
