"""Paged attention of many queries on Hopper: two row tiles of a thread block share its key blocks.

One warpgroup, the producer, only loads. Two others, the consumers, have 64 rows each and read the
same keys and values, so half as many thread blocks read all keys as in `mosaic_warpgroups`. A
consumer starts the scores of the next key block before the softmax of this one, and the tensor
cores have the products of the other consumer besides:

    producer    load 5                     load 6                     load 7
    consumer 0  scores 1         values 0  scores 2         values 1  scores 3
                softmax 0                  softmax 1                  softmax 2
    consumer 1            values 0  scores 2         values 1  scores 3
                                    softmax 1                  softmax 2

The producer also converts e4m3 pages to bfloat16, each block once for all consumers. Copies then
fill a ring of their own. The producer converts its blocks to stages that the consumers have
finished, and loads the next ones; with four bfloat16 and two e4m3 stages:

    producer    convert 4, load 6          convert 5, load 7          convert 6, load 8

The order of keys, the arithmetic of a row and the merge of splits are those of `mosaic_warpgroups`,
so the bits of a row are too. Key blocks that all rows of a consumer see are not masked. Thread
blocks with the last queries, which see the most keys, start first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pipeline import PagedPipeline
from pallas_kernels.verify_attention import mosaic_softmax as softmax
from pallas_kernels.verify_attention.mosaic_plan import RAW, AttentionPlan, result_type
from pallas_kernels.verify_attention.mosaic_tiles import (
    copy_key_block,
    load_queries,
    store_result,
    widen,
)
from pallas_kernels.verify_attention.mosaic_walk import Walk
from pallas_kernels.verify_attention.mosaic_warpgroups import TILED, accumulate, scores_during

# Registers of a thread, of each consumer and of the producer: 3 x 168, moved from the producer.
_REGISTERS = 240, 24
# The same if the producer converts e4m3 pages, by head dim. ptxas uses 173 and 46, 229 and 33.
_CONVERTING_REGISTERS = {64: (216, 72), 128: (232, 40)}


class _PrefillScratch(NamedTuple):
    """Scratch of a thread block; consumer c uses place c of the buffers with a leading
    `row_groups`.

    None if the plan does not need it.
    """

    q_smem: Any  # [row_groups, rows, H] bfloat16
    k_smem: Any  # [stages, key_block, H] bfloat16
    v_smem: Any  # [stages, key_block, H] bfloat16
    q_ready_barrier: Any  # [row_groups]
    k_ready_barrier: Any  # [stages]
    v_ready_barrier: Any  # [stages]
    free_barrier: Any  # [stages]; all consumers have finished the key block
    own_barrier: Any  # [row_groups]; synchronises the threads of a consumer
    plain_smem: Any  # unless `AttentionPlan.aligned`: [row_groups, 1, rows, H] bfloat16
    raw_k_smem: Any  # e4m3 pages: [raw_stages, key_block, H] e4m3
    raw_v_smem: Any  # e4m3 pages: [raw_stages, key_block, H] e4m3
    raw_ready_barrier: Any  # e4m3 pages: [raw_stages]; keys and values have arrived


def _scratch_types(plan: AttentionPlan) -> _PrefillScratch:
    rows, stages, consumers = plan.tile.rows, plan.config.stages, plan.config.row_groups
    bf16 = jnp.bfloat16
    raw_stages, block = plan.config.raw_stages, (plan.config.key_block, plan.H)
    raw = plgpu.SMEM((raw_stages, *block), jnp.float8_e4m3fn, transforms=RAW) if plan.fp8 else None
    arrivals = 1 if plan.fp8 else plan.copies
    plain = (consumers, 1, rows, plan.H)
    return _PrefillScratch(
        q_smem=plgpu.SMEM((consumers, rows, plan.H), bf16, transforms=TILED),
        k_smem=plgpu.SMEM((stages, *block), bf16, transforms=TILED),
        v_smem=plgpu.SMEM((stages, *block), bf16, transforms=plan.v_tiling),
        q_ready_barrier=plgpu.Barrier(num_arrivals=plan.tile_queries, num_barriers=consumers),
        k_ready_barrier=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        v_ready_barrier=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        free_barrier=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        own_barrier=plgpu.Barrier(num_arrivals=1, num_barriers=consumers),
        plain_smem=None if plan.aligned else plgpu.SMEM(plain, bf16),
        raw_k_smem=raw,
        raw_v_smem=raw,
        raw_ready_barrier=plgpu.Barrier(num_arrivals=2 * plan.copies, num_barriers=raw_stages)
        if plan.fp8
        else None,
    )


def prefill_kernel(plan: AttentionPlan, interpret: Any) -> Callable:
    """The kernel of a plan with several row groups: (q, k, v, table, positions[, sinks]) -> out."""
    rows, columns, key_block = plan.tile.rows, plan.columns, plan.config.key_block
    stages, consumers = plan.config.stages, plan.config.row_groups
    loaded_stages = plan.config.raw_stages if plan.fp8 else stages  # of the ring that copies fill
    consumer_registers, producer_registers = (
        _CONVERTING_REGISTERS[plan.H] if plan.fp8 else _REGISTERS
    )
    blocks = pl.cdiv(plan.tiles, consumers)

    def body(
        q_gmem,  # [B, T, K, G, H] bfloat16
        k_pages_gmem,  # [P, Z, K, H] bfloat16 or e4m3
        v_pages_gmem,  # [P, Z, K, H]
        table_gmem,  # [B, W] int32
        positions_gmem,  # [B, T] int32
        *refs,  # sinks [N], if any; out [B, T, K, G, H]; then `_PrefillScratch`
    ):
        *sinks_gmem, out_gmem = refs[: -len(_PrefillScratch._fields)]
        scratch = _PrefillScratch(*refs[-len(_PrefillScratch._fields) :])
        b, walk_index, kv, group = (
            lax.axis_index(name) for name in ("batch", "walk", "head", "group")
        )
        first_tile = (blocks - 1 - lax.axis_index("block")) * consumers
        walk = Walk.of(plan, table_gmem, positions_gmem, b, walk_index, first_tile, consumers)
        num_splits, first_item = walk.num_splits, walk.first_item
        end_item = walk.end_item(num_splits)

        def produce():
            if plan.fp8:
                loaded_smem = scratch.raw_k_smem, scratch.raw_v_smem
                loaded_barriers = scratch.raw_ready_barrier, scratch.raw_ready_barrier
            else:
                loaded_smem = scratch.k_smem, scratch.v_smem
                loaded_barriers = scratch.k_ready_barrier, scratch.v_ready_barrier

            def fetch(item, pages):
                slot = lax.rem(item, loaded_stages)
                at_slot = lambda refs: tuple(ref.at[slot] for ref in refs)
                copy_key_block(
                    plan,
                    walk.sources(item, pages),
                    (k_pages_gmem, v_pages_gmem),
                    at_slot(loaded_smem),
                    at_slot(loaded_barriers),
                    kv,
                    0,
                )

            pipeline = PagedPipeline(
                stages=loaded_stages,
                end=end_item,
                fetch=fetch,
                read_barrier=None if plan.fp8 else scratch.free_barrier,
            )
            first_pages = [walk.pages_of(first_item + ahead) for ahead in range(loaded_stages)]
            pipeline.start(first_item, first_pages)

            @pl.loop(first_item, end_item)
            def _(item):
                pages = walk.pages_of(item + loaded_stages)  # before the wait: hides the latency
                if plan.fp8:
                    convert(item)
                pipeline.refill(item, pages)

            if plan.fp8:  # `convert` has waited for all stages but the last ones

                @pl.loop(jnp.maximum(first_item, end_item - stages), end_item)
                def _(item):
                    await_free(item)

        def await_free(item):
            plgpu.barrier_wait(scratch.free_barrier.at[lax.rem(item, stages)])

        def convert(item):
            """Converts a loaded key block to a stage that all consumers have finished."""
            loaded, slot = lax.rem(item, loaded_stages), lax.rem(item, stages)
            pl.when(item - stages >= first_item)(lambda: await_free(item))
            plgpu.barrier_wait(scratch.raw_ready_barrier.at[loaded])
            widen(scratch.raw_k_smem.at[loaded], scratch.k_smem.at[slot])
            plgpu.barrier_arrive(scratch.k_ready_barrier.at[slot])
            widen(scratch.raw_v_smem.at[loaded], scratch.v_smem.at[slot])
            plgpu.barrier_arrive(scratch.v_ready_barrier.at[slot])

        def consume():
            tile = first_tile + group
            own = scratch.own_barrier.at[group]
            q_smem = scratch.q_smem.at[group]
            plain_smem = None if plan.aligned else scratch.plain_smem.at[group]
            ready = scratch.q_ready_barrier.at[group]
            load_queries(plan, q_gmem, q_smem, plain_smem, ready, own, (b, tile, kv, 0))
            row_position = softmax.row_positions(plan, positions_gmem, b, tile)
            position = lambda query: positions_gmem[b, jnp.minimum(query, plan.T - 1)]
            first_position = position(tile * plan.tile_queries)
            last_position = position((tile + 1) * plan.tile_queries - 1)
            # Not negative where `softmax.unmasked` is reached, which the compiler does not know
            # here.
            minus_zero = first_position.astype(jnp.float32) * -0.0

            def spread(x):
                x = lax.broadcast_in_dim(x, (rows, columns), (0,))
                # Of a division by an array that it knows to be broadcast, a CPU makes a product
                # with the inverse.
                return x if interpret is None else lax.optimization_barrier(x)

            def mask(scores, first_key):
                seen = first_key + key_block - 1 <= first_position
                if plan.window is not None:
                    seen &= first_key > last_position - plan.window
                return lax.cond(
                    seen,
                    lambda scores: softmax.unmasked(plan, scores, minus_zero),
                    lambda scores: softmax.masked(plan, scores, first_key, row_position),
                    scores,
                )

            def scores_of(item, meanwhile):
                """(scores of a key block, result of `meanwhile()`, which runs during the
                product)."""
                slot = lax.rem(item, stages)

                @pl.when(item < end_item)  # past the end: scores of an old slot, which nothing uses
                def _():
                    plgpu.barrier_wait(scratch.k_ready_barrier.at[slot])

                keys_smem = scratch.k_smem.at[slot]
                scores, result = scores_during(plan, q_smem, keys_smem, meanwhile)
                return mask(scores, walk.block_of(item) * key_block), result

            def visit(item, carry):
                scores, state = carry  # [rows, key_block]; float32 [rows], [rows], [rows, columns]

                def add_block():
                    best, total, out = state
                    slot = lax.rem(item, stages)
                    best, total, shrink, weights = softmax.weigh(best, total, scores)
                    plgpu.barrier_wait(scratch.v_ready_barrier.at[slot])
                    out = accumulate(
                        out * spread(shrink),
                        weights.astype(jnp.bfloat16),
                        scratch.v_smem.at[slot],
                        interpret,
                    )
                    plgpu.barrier_arrive(scratch.free_barrier.at[slot])
                    return best, total, out

                return scores_of(item + 1, add_block)

            def one_split(j, carry):
                scores, running = carry
                start, end = walk.items_of(j, first_item, end_item)
                initial = scores, softmax.initial_state(plan)
                scores, split = lax.fori_loop(start, end, visit, initial)
                return scores, softmax.merge(running, split, spread)

            scores, running = scores_of(first_item, lambda: softmax.initial_state(plan))
            _, running = lax.fori_loop(0, num_splits, one_split, (scores, running))
            sink = softmax.sink_values(plan, *sinks_gmem, kv) if sinks_gmem else None
            result = softmax.finish(running, sink, spread)
            out_smem = q_smem if plan.aligned else plain_smem.at[0]
            store_result(plan, result, out_gmem, out_smem, own, (b, tile, kv, 0))

        @pl.when((num_splits > 0) & (group == consumers))
        def _():
            plgpu.set_max_registers(producer_registers, action="decrease")
            produce()

        @pl.when((num_splits > 0) & (group != consumers))
        def _():
            plgpu.set_max_registers(consumer_registers, action="increase")
            consume()

    return plgpu.kernel(
        body,
        out_type=result_type(plan),
        scratch_types=_scratch_types(plan),
        grid=(blocks, plan.B, plan.config.walks, plan.K),  # the last axis varies fastest
        grid_names=("block", "batch", "walk", "head"),
        num_threads=consumers + 1,
        thread_name="group",
        # Rows are reduced within a warp, see `mosaic_warpgroups`.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="verify_attention_prefill",
    )
