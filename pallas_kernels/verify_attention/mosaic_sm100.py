"""Paged attention for Blackwell: TMA-fed tcgen05 MMA over key blocks, one softmax per 256 keys.

A thread block owns up to 128 rows and 128 output columns, with one row per thread, so no reduction
crosses threads. The scores of a group of 256 keys, the shortest split, are in tensor memory at
once. Then one softmax writes the weights back to tensor memory as the first operand of the product
with V. Within a group nothing is rescaled. In longer splits the output in tensor memory is rescaled
before each group but the first one. `mosaic_plan` describes the tiling of rows, keys and splits.

    tensor memory columns  scores 256 (float32) | weights 128 (bfloat16) | output 64, 128 (float32)

One warpgroup loads, issues the MMAs and computes. A slot is refilled while the next MMA runs. V of
a group is loaded during its score MMAs, and K of the next group during the softmax.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.pipeline import PagedPipeline
from pallas_kernels.verify_attention import mosaic_merge
from pallas_kernels.verify_attention import mosaic_softmax as softmax
from pallas_kernels.verify_attention.mosaic_merge import Chip
from pallas_kernels.verify_attention.mosaic_plan import (
    AttentionPlan,
    Tile,
    TuningConfig,
    choose_walks,
    result_type,
    splits_of,
)
from pallas_kernels.verify_attention.mosaic_tiles import (
    load_queries,
    store_result,
    store_split,
    widen,
)
from pallas_kernels.verify_attention.mosaic_walk import Walk

TILE = Tile(rows=128, groups=1, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_RESCALED = 32  # output columns in registers at once while the output is rescaled


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
    fp8: bool = False,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions."""
    H = shape[3]
    key_block = 32 if H > 256 else 64
    # What fits into shared memory beside q. Tensor memory limits an SM to one thread block.
    stages = {64: 8, 128: 4, 256: 2, 512: 2}[H]
    splits = splits_of(window)
    walks = choose_walks(shape, kv_heads, table_size, window, TILE, device.num_sms, splits)
    return TuningConfig(key_block, splits, stages, walks)


class _BlackwellScratch(NamedTuple):
    """Scratch of a thread block; None if the plan does not need it.

    The order of the fields fixes the shared-memory addresses, and with them the generated code.
    """

    q_smem: Any  # [rows, H] bfloat16
    scores_tmem: Any  # [rows, keys of a group] float32
    weights_tmem: Any  # [rows, keys of a group] bfloat16
    out_tmem: Any  # [rows, columns] float32
    q_ready_barrier: Any  # q has arrived
    group_barrier: Any  # for `load_queries`; one warpgroup
    k_ready_barrier: Any  # one per slot: K has arrived
    v_ready_barrier: Any  # one per slot: V has arrived
    k_done_barrier: Any  # one per slot: the MMA with K has finished
    v_done_barrier: Any  # one per slot: the MMA with V has finished
    k_smem: Any  # [stages, key_block, H] bfloat16 or e4m3
    wide_k_smem: Any  # e4m3 pages: [key_block, H] bfloat16
    v_smem: Any  # [stages, key_block, columns] bfloat16 or e4m3
    wide_v_smem: Any  # e4m3 pages: [key_block, columns] bfloat16
    plain_smem: Any  # unless `AttentionPlan.aligned`: [H / columns, rows, columns] bfloat16


def _scratch_types(plan: AttentionPlan) -> _BlackwellScratch:
    rows, columns, config, stages = TILE.rows, plan.columns, plan.config, plan.config.stages
    bf16 = jnp.bfloat16
    chunks = plan.H // plan.columns
    k_smem, *wide_k_smem = plan.slots((plan.H,), _TILED)
    v_smem, *wide_v_smem = plan.slots((columns,), plan.v_tiling)
    copied = lambda: plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages)
    multiplied = lambda: plgpu.Barrier(num_barriers=stages, orders_tensor_core=True)
    copies_q = plan.tile_queries * (1 if plan.aligned else chunks)
    group_keys = _group_blocks(plan) * config.key_block
    return _BlackwellScratch(
        q_smem=plgpu.SMEM((rows, plan.H), bf16, transforms=_TILED),
        k_smem=k_smem,
        v_smem=v_smem,
        scores_tmem=plgpu.TMEM((rows, group_keys), jnp.float32),
        weights_tmem=plgpu.TMEM((rows, group_keys), bf16, packed=True),
        out_tmem=plgpu.TMEM((rows, columns), jnp.float32),
        q_ready_barrier=plgpu.Barrier(num_arrivals=copies_q),
        k_ready_barrier=copied(),
        v_ready_barrier=copied(),
        k_done_barrier=multiplied(),
        v_done_barrier=multiplied(),
        group_barrier=plgpu.Barrier(),
        wide_k_smem=wide_k_smem[0] if plan.fp8 else None,
        wide_v_smem=wide_v_smem[0] if plan.fp8 else None,
        plain_smem=None if plan.aligned else plgpu.SMEM((chunks, rows, plan.columns), bf16),
    )


def _group_blocks(plan: AttentionPlan) -> int:
    """Key blocks of a group, whose scores are in tensor memory at once: those of the shortest
    split."""
    return plan.splits.steps[0][1]


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Softmax of a group of keys: reads scores from tensor memory and stores weights to it.

    Attributes:
      scores_tmem: [rows, keys of a group] float32.
      weights_tmem: [rows, keys of a group] bfloat16.
      row_position: [rows] in registers.
    """

    plan: AttentionPlan
    walk: Walk
    scores_tmem: Any
    weights_tmem: Any
    row_position: jax.Array

    def store(self, start: Any, end: Any, state: tuple) -> tuple[jax.Array, jax.Array]:
        """Stores the weights of items start .. end - 1, relative to the best score of the split so
        far.

        `state` and the result are (best, total) of the split, float32 [rows], before and with this
        group.
        """
        best, total = state
        pieces = self._pieces
        highest = lambda piece, best: jnp.maximum(best, self._scores(piece)[1].max(1))
        best = lax.fori_loop(start * pieces, end * pieces, highest, best)
        if self.plan.splits.grow:
            total = total * jnp.exp2(state[0] - best)

        def weigh(piece, total):
            part, scores = self._scores(piece)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(best, scores.shape, (0,)))
            plgpu.async_store_tmem(self.weights_tmem.at[:, part], weights.astype(jnp.bfloat16))
            return total + weights.sum(1)

        total = lax.fori_loop(start * pieces, end * pieces, weigh, total)
        plgpu.wait_load_tmem()
        plgpu.commit_tmem()
        return best, total

    def _scores(self, piece: Any) -> tuple[Any, jax.Array]:
        """(columns of the group, masked scores float32 [rows, width]) of a piece of a key block."""
        pieces, width = self._pieces, self._width
        part = pl.ds(lax.rem(piece, _group_blocks(self.plan) * pieces) * width, width)
        scores = plgpu.async_load_tmem(self.scores_tmem.at[:, part], layout=TILE.layout)
        first = self.walk.block_of(lax.div(piece, pieces)) * self.plan.config.key_block
        first = first + lax.rem(piece, pieces) * width
        return part, softmax.masked(self.plan, scores, first, self.row_position)

    @property
    def _width(self) -> int:
        """Scores of a thread in registers at once; fp8 pages need registers themselves."""
        return 32 if self.plan.fp8 else self.plan.config.key_block

    @property
    def _pieces(self) -> int:
        return self.plan.config.key_block // self._width


def _rescale(plan: AttentionPlan, out_tmem: Any, shrink: jax.Array) -> None:
    """Multiplies the rows of out_tmem [rows, columns] by shrink [rows]; all MMAs have finished."""
    for first in range(0, plan.columns, _RESCALED):
        part_tmem = out_tmem.at[:, first : first + _RESCALED]
        out = plgpu.async_load_tmem(part_tmem, layout=TILE.layout)
        out = out * lax.broadcast_in_dim(shrink, out.shape, (0,))
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(part_tmem, out)
    plgpu.commit_tmem()


def _walk_kernel(plan: AttentionPlan, interpret):
    """The main kernel: (q, k, v, table, positions[, sinks]) -> out, or (parts, stats) of each
    split."""
    config, merges_inside = plan.config, plan.merges_inside
    rows, layout = TILE.rows, TILE.layout
    key_block, columns, stages = config.key_block, plan.columns, config.stages
    per = _group_blocks(plan)

    def body(
        q_gmem,  # [B, T, K, G, H] bfloat16
        k_pages_gmem,  # [P, Z, K, H] bfloat16 or e4m3
        v_pages_gmem,  # [P, Z, K, H]
        table_gmem,  # [B, W] int32
        positions_gmem,  # [B, T] int32
        *refs,  # sinks [N], if any; the results, see `result_type`; then `_BlackwellScratch`
    ):
        refs, scratch = (
            refs[: -len(_BlackwellScratch._fields)],
            refs[-len(_BlackwellScratch._fields) :],
        )
        sinks_gmem, outs_gmem = (refs[0], refs[1:]) if plan.has_sinks else (None, refs)
        (
            q_smem,
            scores_tmem,
            weights_tmem,
            out_tmem,
            q_ready_barrier,
            group_barrier,
            k_ready_barrier,
            v_ready_barrier,
            k_done_barrier,
            v_done_barrier,
            k_smem,
            wide_k_smem,
            v_smem,
            wide_v_smem,
            plain_smem,
        ) = scratch
        b, walk_index, tile, kv = (
            lax.axis_index(name) for name in ("batch", "walk", "tile", "head")
        )
        first_column = lax.axis_index("share") * columns
        my_columns = pl.ds(first_column, columns)
        walk = Walk.of(plan, table_gmem, positions_gmem, b, walk_index, tile)
        num_splits = walk.num_splits

        def fetch_k(item, pages):
            slot = lax.rem(item, stages)
            for where, keys in walk.sources(item, pages):
                plgpu.copy_gmem_to_smem(
                    k_pages_gmem.at[(*where, kv)], k_smem.at[slot, keys], k_ready_barrier.at[slot]
                )

        def fetch_v(item, pages):
            slot = lax.rem(item, stages)
            for where, keys in walk.sources(item, pages):
                plgpu.copy_gmem_to_smem(
                    v_pages_gmem.at[(*where, kv, my_columns)],
                    v_smem.at[slot, keys],
                    v_ready_barrier.at[slot],
                )

        first_item = walk.first_item
        # Prefetch the page ids before the bounds are known, to hide the load latency.
        first_pages = [walk.pages_of(first_item + ahead) for ahead in range(stages)]

        @pl.when(num_splits > 0)
        def _():
            end_item = walk.end_item(num_splits)
            ring = functools.partial(PagedPipeline, stages=stages, end=end_item)
            keys_ring = ring(fetch=fetch_k, read_barrier=k_done_barrier)
            values_ring = ring(fetch=fetch_v, read_barrier=v_done_barrier)
            keys_ring.start(first_item, first_pages)
            values_ring.start(first_item, first_pages)

            load_queries(
                plan, q_gmem, q_smem, plain_smem, q_ready_barrier, group_barrier, (b, tile, kv, 0)
            )
            queries = [
                jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
                for t in range(plan.tile_queries)
            ]
            row_position = softmax.row_values(plan, plan.G, [positions_gmem[b, t] for t in queries])
            spread = lambda x: lax.broadcast_in_dim(x, (rows, columns), (0,))
            weights = _Weights(plan, walk, scores_tmem, weights_tmem, row_position)
            in_group = lambda item: pl.ds(lax.rem(item, per) * key_block, key_block)

            def multiply(start, end, pipeline, ready_barrier, product):
                """Runs `product` for each item; refills a slot while the next MMA runs."""

                def one(item, pages):
                    slot = lax.rem(item, stages)
                    next_pages = walk.pages_of(item + stages)  # prefetched: hides the latency
                    after = lambda: pl.when(item > start)(lambda: pipeline.refill(item - 1, pages))
                    if plan.fp8:  # the single bfloat16 buffer must be free first
                        after()
                    plgpu.barrier_wait(ready_barrier.at[slot])
                    product(item, slot)
                    if not plan.fp8:
                        after()
                    return next_pages

                last = end - 1
                pipeline.refill(last, lax.fori_loop(start, end, one, walk.pages_of(start + stages)))

            def as_bfloat16(block_smem, wide_smem):
                """A key block in bfloat16; e4m3 blocks are converted to wide_smem."""
                if not plan.fp8:
                    return block_smem
                widen(block_smem, wide_smem)
                return wide_smem

            def score(item, slot):
                keys_smem = as_bfloat16(k_smem.at[slot], wide_k_smem)  # [key_block, H]
                plgpu.tcgen05_mma(
                    scores_tmem.at[:, in_group(item)],
                    q_smem,
                    keys_smem.transpose((1, 0)),
                    k_done_barrier.at[slot],
                    accumulate=False,
                )

            def add_group(start, end, state, is_first):
                """Adds key blocks start .. end - 1, of one group, to the split; returns its new
                (best, total)."""
                multiply(start, end, keys_ring, k_ready_barrier, score)
                best, total = weights.store(start, end, state)
                if plan.splits.grow:
                    shrink = jnp.exp2(state[0] - best)
                    pl.when(~is_first)(functools.partial(_rescale, plan, out_tmem, shrink))

                def weighted(item, slot):
                    values_smem = as_bfloat16(v_smem.at[slot], wide_v_smem)  # [key_block, columns]
                    plgpu.tcgen05_mma(
                        out_tmem,
                        weights_tmem.at[:, in_group(item)],
                        values_smem,
                        v_done_barrier.at[slot],
                        accumulate=(item > start) | ~is_first if plan.splits.grow else item > start,
                    )

                multiply(start, end, values_ring, v_ready_barrier, weighted)
                return best, total

            def one_split(j, running):
                start, end = walk.items_of(j, first_item, end_item)
                best, total, _ = softmax.initial_state(plan)
                if plan.splits.grow:
                    first_group = lax.div(start, per)

                    def one_group(i, state):
                        blocks = jnp.maximum(i * per, start), jnp.minimum((i + 1) * per, end)
                        return add_group(*blocks, state, i == first_group)

                    groups = first_group, lax.div(end - 1, per) + 1
                    best, total = lax.fori_loop(*groups, one_group, (best, total))
                else:
                    best, total = add_group(start, end, (best, total), True)
                out = plgpu.async_load_tmem(out_tmem, layout=layout)
                if merges_inside:
                    running = softmax.merge(running, (best, total, out), spread)
                    plgpu.wait_load_tmem()
                    return running
                parts_gmem, stats_gmem = outs_gmem
                where = (b, kv, tile, walk.split(j))
                store_split(plan, out, parts_gmem.at[(*where, slice(None), my_columns)], interpret)
                plgpu.wait_load_tmem()

                @pl.when(lax.axis_index("share") == 0)
                def _():
                    stats_gmem[(*where, 0)] = best
                    stats_gmem[(*where, 1)] = total

                return running

            running = softmax.initial_state(plan) if merges_inside else ()
            running = lax.fori_loop(0, num_splits, one_split, running)
            if merges_inside:
                sink = softmax.sink_values(plan, sinks_gmem, kv)
                result = softmax.finish(running, sink, spread)
                # Change the register layout through tensor memory, to store without bank conflicts.
                plgpu.async_store_tmem(out_tmem, result.astype(jnp.float32))
                plgpu.commit_tmem()
                result = plgpu.async_load_tmem(out_tmem, layout=plgpu.Layout.TCGEN05)
                result = result.astype(jnp.bfloat16)
                out_smem = q_smem.at[:, my_columns] if plan.aligned else plain_smem.at[0]
                place = (b, tile, kv, first_column)
                store_result(plan, result, outs_gmem[0], out_smem, group_barrier, place)

    return plgpu.kernel(
        body,
        out_type=result_type(plan),
        scratch_types=_scratch_types(plan),
        grid=(plan.B, config.walks, plan.tiles, plan.K, plan.shares),
        grid_names=("batch", "walk", "tile", "head", "share"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="verify_attention",
    )


verify_attention = functools.partial(
    mosaic_merge.verify_attention, Chip(TILE, choose_config, _walk_kernel)
)
