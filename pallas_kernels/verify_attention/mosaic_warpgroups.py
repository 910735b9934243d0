"""Paged attention for Hopper: TMA-fed wgmma over key blocks, whose sums are in registers.

A thread block owns up to 64 rows (queries times heads of one kv head). One or two warpgroups
compute the same scores and 128 output columns each. Within a split the online softmax is rescaled
in registers after each key block. `mosaic_plan` describes the tiling of rows, keys and splits. fp8
pages are converted to bfloat16 from one shared-memory buffer to another, which is exact.

Warpgroup 0 issues all loads. A slot of the ring (`pipeline.PagedPipeline`) holds one key block of K
and V; it is refilled when all warpgroups have read it. Queries, keys and values are read from
shared memory, the weights of values from registers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pipeline import PagedPipeline
from pallas_kernels.verify_attention import mosaic_softmax as softmax
from pallas_kernels.verify_attention.mosaic_plan import AttentionPlan, result_type
from pallas_kernels.verify_attention.mosaic_tiles import (
    copy_key_block,
    load_queries,
    store_result,
    store_split,
    widen,
)
from pallas_kernels.verify_attention.mosaic_walk import Walk

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


_SCORE_COLUMNS = 128  # head-dim columns of q and k in one unrolled group of wgmmas


def scores_during(
    plan: AttentionPlan, q_smem: Any, keys_smem: Any, meanwhile: Callable[[], Any]
) -> tuple[jax.Array, Any]:
    """(q @ keys.T, float32 [rows, key_block]; result of `meanwhile()`, which is executed during the
    product).

    q_smem is bfloat16 [rows, H], keys_smem bfloat16 [key_block, H]; H is at most 128.
    """

    def score(acc_reg):
        plgpu.wgmma(acc_reg, q_smem, keys_smem.transpose((1, 0)))
        result = meanwhile()
        return acc_reg[...], result

    return pl.run_scoped(score, plgpu.ACC((plan.tile.rows, keys_smem.shape[0]), jnp.float32))


def _scores(plan: AttentionPlan, q_smem: Any, keys_smem: Any) -> jax.Array:
    """The product of `scores_during`, for any H."""
    if plan.H <= _SCORE_COLUMNS:
        return scores_during(plan, q_smem, keys_smem, lambda: None)[0]

    def score(acc_reg):
        # Not unrolled: the descriptors of all steps would take registers.
        @pl.loop(0, plan.H // _SCORE_COLUMNS)
        def _(i):
            part = pl.ds(i * _SCORE_COLUMNS, _SCORE_COLUMNS)
            keys_part_smem = keys_smem.at[:, part]
            plgpu.wgmma(acc_reg, q_smem.at[:, part], keys_part_smem.transpose((1, 0)))

        return acc_reg[...]

    return pl.run_scoped(score, plgpu.ACC((plan.tile.rows, keys_smem.shape[0]), jnp.float32))


def accumulate(
    out_reg: jax.Array, weights_reg: jax.Array, values_smem: Any, interpret: Any
) -> jax.Array:
    """out_reg + weights_reg @ values, float32 [rows, columns] in registers.

    weights_reg is bfloat16 [rows, key_block], values_smem bfloat16 [key_block, columns]. Keys and
    values may be overwritten by a copy afterwards.
    """
    # The interpreter supports neither an initialised accumulator nor a wgmma operand in registers.
    if interpret is not None:
        product = jnp.dot(weights_reg, values_smem[...], preferred_element_type=jnp.float32)
        # unlike a wgmma read, this read needs a fence before the next TMA write
        plgpu.commit_smem()
        return out_reg + product
    return pl.run_state(lambda acc_reg: plgpu.wgmma(acc_reg, weights_reg, values_smem))(
        plgpu.ACC.init(out_reg)
    )


class _WalkScratch(NamedTuple):
    """Scratch of a thread block; None if the plan does not need it.

    The order of the fields fixes the shared-memory addresses, and with them the generated code.
    """

    q_smem: Any  # [rows, H] bfloat16
    k_smem: Any  # [stages, key_block, H] bfloat16 or e4m3
    wide_k_smem: Any  # e4m3 pages: [key_block, H] bfloat16
    v_smem: Any  # [stages, groups, key_block, columns] bfloat16 or e4m3
    wide_v_smem: Any  # e4m3 pages: [groups, key_block, columns] bfloat16
    q_ready_barrier: Any  # q has arrived
    k_ready_barrier: Any  # one per slot
    v_ready_barrier: Any  # one per slot
    free_barrier: Any  # one per slot: all warpgroups have finished the key block
    group_barrier: Any  # synchronises the warpgroups
    plain_smem: Any  # unless `AttentionPlan.aligned`: [H / columns, rows, columns] bfloat16


def _scratch_types(plan: AttentionPlan) -> _WalkScratch:
    rows, columns, groups, stages = plan.tile.rows, plan.columns, plan.groups, plan.config.stages
    bf16 = jnp.bfloat16
    chunks = plan.H // plan.columns
    copies_q = plan.tile_queries * (1 if plan.aligned else chunks)
    k_smem, *wide_k_smem = plan.slots((plan.H,), TILED)
    v_smem, *wide_v_smem = plan.slots((groups, columns), plan.v_tiling)
    return _WalkScratch(
        q_smem=plgpu.SMEM((rows, plan.H), bf16, transforms=TILED),
        k_smem=k_smem,
        v_smem=v_smem,
        q_ready_barrier=plgpu.Barrier(num_arrivals=copies_q),
        k_ready_barrier=plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages),
        v_ready_barrier=plgpu.Barrier(num_arrivals=plan.copies * groups, num_barriers=stages),
        free_barrier=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        group_barrier=plgpu.Barrier(num_arrivals=groups),
        wide_k_smem=wide_k_smem[0] if plan.fp8 else None,
        wide_v_smem=wide_v_smem[0] if plan.fp8 else None,
        plain_smem=None if plan.aligned else plgpu.SMEM((chunks, rows, plan.columns), bf16),
    )


def walk_kernel(plan: AttentionPlan, interpret: Any) -> Callable:
    """The main kernel: (q, k, v, table, positions[, sinks]) -> out, or (parts, stats) of each
    split."""
    config, merges_inside = plan.config, plan.merges_inside
    rows, key_block, columns = plan.tile.rows, config.key_block, plan.columns
    groups, stages = plan.groups, config.stages

    def body(
        q_gmem,  # [B, T, K, G, H] bfloat16
        k_pages_gmem,  # [P, Z, K, H] bfloat16 or e4m3
        v_pages_gmem,  # [P, Z, K, H]
        table_gmem,  # [B, W] int32
        positions_gmem,  # [B, T] int32
        *refs,  # sinks [N], if any; the results, see `result_type`; then `_WalkScratch`
    ):
        refs, scratch = refs[: -len(_WalkScratch._fields)], refs[-len(_WalkScratch._fields) :]
        sinks_gmem, outs_gmem = (refs[0], refs[1:]) if plan.has_sinks else (None, refs)
        (
            q_smem,
            k_smem,
            wide_k_smem,
            v_smem,
            wide_v_smem,
            q_ready_barrier,
            k_ready_barrier,
            v_ready_barrier,
            free_barrier,
            group_barrier,
            plain_smem,
        ) = scratch
        b, walk_index, tile, kv = (
            lax.axis_index(name) for name in ("batch", "walk", "tile", "head")
        )
        group, share = lax.axis_index("group"), lax.axis_index("share")
        first_column = (share * groups + group) * columns
        my_columns = pl.ds(first_column, columns)
        walk = Walk.of(plan, table_gmem, positions_gmem, b, walk_index, tile)
        num_splits = walk.num_splits

        def fetch(item, pages):
            slot = lax.rem(item, stages)
            sources = walk.sources(item, pages)
            place = k_smem.at[slot], *(v_smem.at[slot, g] for g in range(groups))
            ready = k_ready_barrier.at[slot], v_ready_barrier.at[slot]
            copy_key_block(plan, sources, (k_pages_gmem, v_pages_gmem), place, ready, kv, share)

        first_item = walk.first_item
        # Prefetch the page ids before the bounds are known, to hide the load latency.
        first_pages = [walk.pages_of(first_item + ahead) for ahead in range(stages)]

        @pl.when(num_splits > 0)
        def _():
            end_item = walk.end_item(num_splits)
            pipeline = PagedPipeline(
                stages=stages,
                end=end_item,
                fetch=fetch,
                read_barrier=free_barrier if groups > 1 else None,
            )
            pl.when(group == 0)(functools.partial(pipeline.start, first_item, first_pages))

            load_queries(
                plan,
                q_gmem,
                q_smem,
                plain_smem,
                q_ready_barrier,
                group_barrier,
                (b, tile, kv, group),
            )
            row_position = softmax.row_positions(plan, positions_gmem, b, tile)
            spread = lambda x: lax.broadcast_in_dim(x, (rows, columns), (0,))

            def sync_groups():
                if groups > 1:
                    plgpu.barrier_arrive(group_barrier)
                    plgpu.barrier_wait(group_barrier)

            def visit(item, carry):
                best, total, out = carry  # float32 [rows], [rows], [rows, columns]
                slot = lax.rem(item, stages)
                pages = walk.pages_of(item + stages)  # prefetched: hides the latency
                plgpu.barrier_wait(k_ready_barrier.at[slot])
                keys_smem = k_smem.at[slot]  # [key_block, H]
                if plan.fp8:  # each warpgroup converts its part of the columns
                    share_of_k = pl.ds(group * (plan.H // groups), plan.H // groups)
                    widen(keys_smem.at[:, share_of_k], wide_k_smem.at[:, share_of_k])
                    keys_smem = wide_k_smem
                    sync_groups()

                # [rows, key_block] float32
                scores = _scores(plan, q_smem, keys_smem)
                if plan.fp8:  # before wide_k_smem is overwritten
                    sync_groups()
                scores = softmax.masked(plan, scores, walk.block_of(item) * key_block, row_position)
                best, total, shrink, weights = softmax.weigh(best, total, scores)
                plgpu.barrier_wait(v_ready_barrier.at[slot])
                values_smem = v_smem.at[slot, group]  # [key_block, columns]
                if plan.fp8:
                    widen(values_smem, wide_v_smem.at[group])
                    values_smem = wide_v_smem.at[group]
                out = accumulate(
                    out * spread(shrink),
                    weights.astype(jnp.bfloat16),
                    values_smem,
                    interpret,
                )
                if groups > 1:
                    plgpu.barrier_arrive(free_barrier.at[slot])
                pl.when(group == 0)(functools.partial(pipeline.refill, item, pages))
                return best, total, out

            def one_split(j, running):
                start, end = walk.items_of(j, first_item, end_item)
                split = lax.fori_loop(start, end, visit, softmax.initial_state(plan))
                if merges_inside:
                    return softmax.merge(running, split, spread)
                parts_gmem, stats_gmem = outs_gmem
                best, total, out = split
                where = (b, kv, tile, walk.split(j))
                store_split(plan, out, parts_gmem.at[(*where, slice(None), my_columns)], interpret)

                @pl.when((group == 0) & (share == 0))
                def _():
                    stats_gmem[(*where, 0)] = best
                    stats_gmem[(*where, 1)] = total

                return running

            running = softmax.initial_state(plan) if merges_inside else ()
            running = lax.fori_loop(0, num_splits, one_split, running)
            if merges_inside:
                sink = softmax.sink_values(plan, sinks_gmem, kv)
                result = softmax.finish(running, sink, spread)
                out_smem = q_smem.at[:, my_columns] if plan.aligned else plain_smem.at[group]
                place = (b, tile, kv, first_column)
                store_result(plan, result, outs_gmem[0], out_smem, group_barrier, place)

    return plgpu.kernel(
        body,
        out_type=result_type(plan),
        scratch_types=_scratch_types(plan),
        grid=(plan.B, config.walks, plan.tiles, plan.K, plan.shares),
        grid_names=("batch", "walk", "tile", "head", "share"),
        num_threads=groups,
        thread_name="group",
        # Rows are reduced within a warp. Without reduction scratch two thread blocks fit on one SM.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="verify_attention",
    )
