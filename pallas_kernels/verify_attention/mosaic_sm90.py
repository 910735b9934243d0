"""Paged attention for Hopper: wgmma over key blocks brought by TMA, splits merged in one fixed order.

One thread block owns up to 64 rows of one kv head: row r is query r // G, head r % G of the group.
Keys come in blocks of `key_block` at absolute positions, and blocks form splits of `split` keys, also
at absolute positions. Every split starts a fresh online softmax (best, total, out); splits are merged
one after the other in ascending order. Who merges is a matter of speed only:

  walks = 1   a thread block walks over all splits and merges in registers;
  walks > 1   walk c takes the splits c, c + walks, ... and stores each one's (best, total, out); a
              second kernel merges them with the same formula in the same order.

So the bits of a row depend neither on the other rows, nor on how the work is cut. A masked key
contributes exactly 0 and a masked block or split leaves (best, total, out) as they were.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch

_ROWS = 64  # of one wgmma
_MASKED = -1e30
# Best of no key at all: above _MASKED, so that exp2(_MASKED - _NOTHING) is exactly 0.
_NOTHING = -1e29
_LOG2E = math.log2(math.e)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
_SCORE_COLUMNS = 128  # of q and k in one unrolled product
_MERGE_UNROLL = 4


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the work is cut; no field but `key_block` and `split` can change a bit of the result.

    Attributes:
      key_block: keys of one wgmma; a function of the head dim alone.
      split: keys of one softmax, a constant.
      stages: key blocks in flight.
      walks: thread blocks that share the splits of one row tile.
    """

    key_block: int
    split: int
    stages: int
    walks: int


@dataclasses.dataclass(frozen=True)
class _Plan:
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
    has_sinks: bool
    config: TuningConfig

    @property
    def N(self) -> int:
        return self.K * self.G

    @property
    def tile_queries(self) -> int:
        """Queries of one row tile."""
        return min(self.T, _ROWS // self.G)

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
        return min(2, self.H // self.columns)

    @property
    def shares(self) -> int:
        """Thread blocks that share the columns of one row tile (registers hold 256 of them)."""
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


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions."""
    B, T, N, H = shape
    G = N // kv_heads
    key_block = 32 if H > 256 else 64
    # What lets two thread blocks of head dim 64 or 128 share a multiprocessor.
    stages = {64: 6, 128: 3 if G % 8 == 0 else 2, 256: 2, 512: 3}[H]
    queries = min(T, _ROWS // G)
    blocks = B * kv_heads * pl.cdiv(T, queries)
    splits = _max_splits(256, table_size, window, queries)
    walks = min(splits, pl.cdiv(2 * device.num_sms, blocks))
    # Storing and merging splits costs a kernel: worth it only if walks are long and SMs are idle.
    if splits <= 2 or 4 * blocks >= 3 * device.num_sms or not _can_store_splits(G, H):
        walks = 1
    return TuningConfig(key_block, 256, stages, walks)


def _can_store_splits(group: int, head_dim: int) -> bool:
    """The merging kernel takes 128 numbers at a time: with H = 64 two heads of one query."""
    return head_dim % 128 == 0 or group % (128 // head_dim) == 0


@functools.partial(jax.jit, static_argnames=("scale", "window", "launch", "config"))
def verify_attention(
    q: jax.Array,  # [B, T, N, H]
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    scale: float,
    window: int | None,
    sinks: jax.Array | None,  # [N]
    launch: Launch,
    config: TuningConfig | None = None,
) -> jax.Array:
    B, T, N, H = q.shape
    _, Z, K, _ = k_pages.shape
    W = page_table.shape[1]
    if config is None:
        config = choose_config(q.shape, K, W * Z, window, launch.device)
    plan = _Plan(B, T, K, N // K, H, Z, W, float(scale), window, sinks is not None, config)
    table, positions = (x.astype(jnp.int32) for x in (page_table, positions))
    q = q.reshape(B, T, K, N // K, H)
    sinks = () if sinks is None else (sinks,)
    operands = (q, k_pages, v_pages, table, positions, *sinks)
    if plan.merges_inside:
        out = _walk_kernel(plan, launch.interpret)(*operands)
    else:
        parts, stats = _walk_kernel(plan, launch.interpret)(*operands)
        parts = parts.reshape(*parts.shape[:-2], _ROWS * H)
        out = _merge_kernel(plan, launch.interpret)(parts, stats, positions, *sinks)
    return out.reshape(B, T, N, H)


def _span(plan: _Plan, positions, b, tile) -> tuple[Any, Any, Any, Any]:
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


def _merge(running, split, spread):
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


def _finish(running, sink, spread):
    """The sink joins as one more key without a value (None: no sink), then the softmax is divided."""
    best, total, out = running
    if sink is not None:
        new_best = jnp.maximum(best, sink)
        old = jnp.exp2(best - new_best)
        total = total * old + jnp.exp2(sink - new_best)
        out = out * spread(old)
    return (out / spread(total)).astype(jnp.bfloat16)


def _row_values(plan: _Plan, repeat: int, values) -> jax.Array:
    """Row r -> values[(r // repeat) % len(values)], as a column of wgmma's accumulator."""
    row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_ROW_LAYOUT)
    out = jnp.where(row < _ROWS, values[0], values[0])  # a constant would have no layout
    for start in range(repeat, plan.tile_rows, repeat):
        out = jnp.where(row >= start, values[start // repeat % len(values)], out)
    return out


def _walk_kernel(plan: _Plan, interpret):
    """The kernel that visits keys: (q, k, v, table, positions[, sinks]) -> out, or (parts, stats)."""
    config, merges_inside = plan.config, plan.merges_inside
    key_block, columns = config.key_block, plan.columns
    per, groups, stages = plan.blocks_per_split, plan.groups, config.stages

    def body(q, k_pages, v_pages, table, positions, *rest):
        sinks, rest = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        outs, rest = (rest[:1], rest[1:]) if merges_inside else (rest[:2], rest[2:])
        q_s, k_s, v_s, q_ready, k_ready, v_ready, freed, together, *rest = rest
        plain_s = None if plan.aligned else rest[0]
        b, walk, tile, kv = (lax.axis_index(name) for name in ("batch", "walk", "tile", "head"))
        group, share = lax.axis_index("group"), lax.axis_index("share")
        mine = pl.ds((share * groups + group) * columns, columns)
        first_block, last_block, first_split, last_split = _span(plan, positions, b, tile)
        my_first = first_split + walk
        num_mine = lax.div(last_split - my_first + config.walks, config.walks)

        def block_of(item):
            split = my_first + lax.div(item, per) * config.walks
            return split * per + lax.rem(item, per)

        def pages_of(item):
            start = block_of(item) * key_block
            cols = [lax.div(start + j * plan.copy_keys, plan.Z) for j in range(plan.copies)]
            if plan.window is None:
                cols = [jnp.minimum(col, plan.W - 1) for col in cols]
            else:
                cols = [lax.rem(col, plan.W) for col in cols]
            return tuple(table[b, col] for col in cols)

        def fetch(item, pages):
            slot = lax.rem(item, stages)
            within = lax.rem(block_of(item) * key_block, plan.Z) if key_block < plan.Z else 0
            rows = pl.ds(within, plan.copy_keys)
            for j, page in enumerate(pages):
                keys = pl.ds(j * plan.copy_keys, plan.copy_keys)
                plgpu.copy_gmem_to_smem(
                    k_pages.at[page, rows, kv], k_s.at[slot, keys], k_ready.at[slot]
                )
            for j, page in enumerate(pages):
                keys = pl.ds(j * plan.copy_keys, plan.copy_keys)
                for g in range(groups):
                    plgpu.copy_gmem_to_smem(
                        v_pages.at[page, rows, kv, pl.ds((share * groups + g) * columns, columns)],
                        v_s.at[slot, g, keys],
                        v_ready.at[slot],
                    )

        first_item = jnp.where(walk == 0, first_block - first_split * per, 0)
        # Before anything is known of the length: what memory answers late is asked for at once.
        first_pages = [pages_of(first_item + ahead) for ahead in range(stages)]

        @pl.when(num_mine > 0)
        def _():
            is_last = my_first + (num_mine - 1) * config.walks == last_split
            short = jnp.where(is_last, last_block - last_split * per, per - 1)
            end_item = (num_mine - 1) * per + short + 1

            @pl.when(group == 0)
            def _():
                for ahead, pages in enumerate(first_pages):
                    item = first_item + ahead
                    pl.when(item < end_item)(functools.partial(fetch, item, pages))

            _load_queries(plan, q, q_s, plain_s, q_ready, together, (b, tile, kv, group))
            queries = [
                jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
                for t in range(plan.tile_queries)
            ]
            row_position = _row_values(plan, plan.G, [positions[b, t] for t in queries])
            spread = lambda x: lax.broadcast_in_dim(x, (_ROWS, columns), (0,))

            def visit(item, carry):
                best, total, out = carry
                slot = lax.rem(item, stages)
                pages = pages_of(item + stages)  # early: memory answers while we compute
                plgpu.barrier_wait(k_ready.at[slot])

                def score(acc):
                    if plan.H <= _SCORE_COLUMNS:
                        plgpu.wgmma(acc, q_s, k_s.at[slot].transpose((1, 0)))
                        return acc[...]

                    # A loop, lest the descriptors of all steps take up registers.
                    @pl.loop(0, plan.H // _SCORE_COLUMNS)
                    def _(i):
                        part = pl.ds(i * _SCORE_COLUMNS, _SCORE_COLUMNS)
                        plgpu.wgmma(acc, q_s.at[:, part], k_s.at[slot, :, part].transpose((1, 0)))

                    return acc[...]

                scores = pl.run_scoped(score, plgpu.ACC((_ROWS, key_block), jnp.float32))
                key = plgpu.broadcasted_iota(
                    jnp.int32, (_ROWS, key_block), 1, layout=plgpu.Layout.WGMMA
                )
                key = key + block_of(item) * key_block
                limit = lax.broadcast_in_dim(row_position, (_ROWS, key_block), (0,))
                visible = key <= limit
                if plan.window is not None:
                    visible &= key > limit - plan.window
                scores = jnp.where(visible, scores * (plan.scale * _LOG2E), _MASKED)
                new_best = jnp.maximum(best, scores.max(1))
                shrink = jnp.exp2(best - new_best)
                weights = jnp.exp2(
                    scores - lax.broadcast_in_dim(new_best, (_ROWS, key_block), (0,))
                )
                total = total * shrink + weights.sum(1)
                plgpu.barrier_wait(v_ready.at[slot])
                out = _accumulate(
                    out * spread(shrink),
                    weights.astype(jnp.bfloat16),
                    v_s.at[slot, group],
                    interpret,
                )
                if groups > 1:
                    plgpu.barrier_arrive(freed.at[slot])

                @pl.when(group == 0)
                def _():
                    if groups > 1:
                        plgpu.barrier_wait(freed.at[slot])

                    @pl.when(item + stages < end_item)
                    def _():
                        fetch(item + stages, pages)

                return new_best, total, out

            def one_split(j, running):
                start = jnp.maximum(j * per, first_item)
                end = jnp.minimum((j + 1) * per, end_item)
                split = lax.fori_loop(start, end, visit, _nothing(columns))
                if merges_inside:
                    return _merge(running, split, spread)
                parts, stats = outs
                best, total, out = split
                where = (b, kv, tile, my_first + j * config.walks - first_split)
                parts[(*where, slice(None), mine)] = out

                @pl.when((group == 0) & (share == 0))
                def _():
                    stats[(*where, 0)] = best
                    stats[(*where, 1)] = total

                return running

            running = _nothing(columns) if merges_inside else ()
            running = lax.fori_loop(0, num_mine, one_split, running)
            if merges_inside:
                sink = None
                if plan.has_sinks:
                    sink = [
                        sinks[kv * plan.G + g].astype(jnp.float32) * _LOG2E for g in range(plan.G)
                    ]
                    sink = _row_values(plan, 1, sink)
                result = _finish(running, sink, spread)
                staged = q_s.at[:, mine] if plan.aligned else plain_s.at[group]
                _store_result(plan, result, outs[0], staged, together, (b, tile, kv, mine))

    if merges_inside:
        out_type = jax.ShapeDtypeStruct((plan.B, plan.T, plan.K, plan.G, plan.H), jnp.bfloat16)
    else:
        where = (plan.B, plan.K, plan.tiles, plan.max_splits)
        out_type = (
            jax.ShapeDtypeStruct((*where, _ROWS, plan.H), jnp.float32),
            jax.ShapeDtypeStruct((*where, 2, _ROWS), jnp.float32),
        )
    bf16 = jnp.bfloat16
    plain = [] if plan.aligned else [plgpu.SMEM((plan.H // columns, _ROWS, columns), bf16)]
    copies_q = plan.tile_queries * (1 if plan.aligned else plan.H // columns)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(
            plgpu.SMEM((_ROWS, plan.H), bf16, transforms=_TILED),
            plgpu.SMEM((stages, key_block, plan.H), bf16, transforms=_TILED),
            plgpu.SMEM((stages, groups, key_block, columns), bf16, transforms=plan.v_tiling),
            plgpu.Barrier(num_arrivals=copies_q),
            plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=plan.copies * groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups),
            *plain,
        ),
        grid=(plan.B, config.walks, plan.tiles, plan.K, plan.shares),
        grid_names=("batch", "walk", "tile", "head", "share"),
        num_threads=groups,
        thread_name="group",
        # Rows are reduced within a warp: no scratch, so that two thread blocks fit on a multiprocessor.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="verify_attention",
    )


def _nothing(columns: int):
    """(best, total, out) of no key at all."""
    full = lambda shape, x, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    return (
        full((_ROWS,), _NOTHING, _ROW_LAYOUT),
        full((_ROWS,), 0.0, _ROW_LAYOUT),
        full((_ROWS, columns), 0.0, plgpu.Layout.WGMMA),
    )


def _accumulate(out, weights, values, interpret):
    """out + weights @ values. The interpreter has neither accumulators that start from a value, nor
    wgmma with an operand in registers."""
    if interpret is not None:
        product = jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # this read, unlike wgmma's, needs a fence before the next copy's write
        return out + product
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(out))


def _load_queries(plan: _Plan, q, q_s, plain_s, q_ready, together, place) -> None:
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


def _store_result(plan: _Plan, result, out, staged, together, place) -> None:
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


def _merge_kernel(plan: _Plan, interpret):
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
                for i, nothing in enumerate((_NOTHING, 0.0))
            )
            out = parts[b, kv, tile, split, pl.ds(row * plan.H, width)]
            return best, total, jnp.where(mask, plgpu.layout_cast(out, layout), 0.0)

        def some_splits(i, running):
            # All loads are under way before the first is needed.
            for split in [load(i * _MERGE_UNROLL + j) for j in range(_MERGE_UNROLL)]:
                running = _merge(running, split, lambda x: x)
            return running

        rounds = lax.div(last - first + _MERGE_UNROLL, _MERGE_UNROLL)
        running = tuple(map(constant, (_NOTHING, 0.0, 0.0)))
        running = lax.fori_loop(0, rounds, some_splits, running)
        sink = None
        if plan.has_sinks:
            sink = per_head(
                [sinks[pack * heads + h].astype(jnp.float32) * _LOG2E for h in range(heads)]
            )
        out[b, query, pl.ds(pack * width, width)] = _finish(running, sink, lambda x: x)

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
