"""Paged attention for Hopper: wgmma over key blocks brought by TMA, splits merged in one fixed order.

A thread block owns up to 64 rows. Within a split the softmax is rescaled after each key block, in
registers; how rows, keys and splits are cut is said in `mosaic_splits`. Pages in fp8 are widened to
bfloat16 from one place in shared memory to another, which is exact.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Launch
from pallas_kernels.verify_attention import mosaic_splits as splits
from pallas_kernels.verify_attention.mosaic_splits import Plan, TuningConfig

TILE = splits.Tile(rows=64, groups=2, layout=plgpu.Layout.WGMMA)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_SCORE_COLUMNS = 128  # of q and k in one unrolled product


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions."""
    N, H = shape[2:]
    key_block = 32 if H > 256 else 64
    # What lets two thread blocks of head dim 64 or 128 share a multiprocessor.
    stages = {64: 6, 128: 3 if N // kv_heads % 8 == 0 else 2, 256: 2, 512: 3}[H]
    walks = splits.choose_walks(shape, kv_heads, table_size, window, TILE, 2 * device.num_sms)
    return TuningConfig(key_block, 256, stages, walks)


@functools.partial(jax.jit, static_argnames=("scale", "window", "launch", "config", "soft_cap"))
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
    soft_cap: float | None = None,
) -> jax.Array:
    if config is None:
        Z, K = k_pages.shape[1:3]
        config = choose_config(q.shape, K, page_table.shape[1] * Z, window, launch.device)
    facts = dict(scale=float(scale), window=window, soft_cap=soft_cap, has_sinks=sinks is not None)
    plan = splits.make_plan(q, k_pages, page_table, TILE, config, **facts)
    operands = (q, k_pages, v_pages, page_table, positions, sinks)
    return splits.attend(plan, _walk_kernel, launch.interpret, *operands)


def _walk_kernel(plan: Plan, interpret):
    """The kernel that visits keys: (q, k, v, table, positions[, sinks]) -> out, or (parts, stats)."""
    config, merges_inside = plan.config, plan.merges_inside
    rows, kinds = TILE.rows, 2 if plan.fp8 else 1
    key_block, columns = config.key_block, plan.columns
    per, groups, stages = plan.blocks_per_split, plan.groups, config.stages

    def body(q, k_pages, v_pages, table, positions, *rest):
        sinks, rest = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        outs, rest = (rest[:1], rest[1:]) if merges_inside else (rest[:2], rest[2:])
        q_s, *rest = rest
        (k_s, *wide_k), (v_s, *wide_v) = rest[:kinds], rest[kinds : 2 * kinds]
        q_ready, k_ready, v_ready, freed, together, *rest = rest[2 * kinds :]
        plain_s = None if plan.aligned else rest[0]
        b, number, tile, kv = (lax.axis_index(name) for name in ("batch", "walk", "tile", "head"))
        group, share = lax.axis_index("group"), lax.axis_index("share")
        mine = pl.ds((share * groups + group) * columns, columns)
        walk = splits.Walk.of(plan, table, positions, b, number, tile)
        num_mine = walk.num_splits

        def fetch(item, pages):
            slot = lax.rem(item, stages)
            for where, keys in walk.sources(item, pages):
                plgpu.copy_gmem_to_smem(
                    k_pages.at[(*where, kv)], k_s.at[slot, keys], k_ready.at[slot]
                )
            for where, keys in walk.sources(item, pages):
                for g in range(groups):
                    columns_of_g = pl.ds((share * groups + g) * columns, columns)
                    plgpu.copy_gmem_to_smem(
                        v_pages.at[(*where, kv, columns_of_g)],
                        v_s.at[slot, g, keys],
                        v_ready.at[slot],
                    )

        first_item = walk.first_item
        # Before anything is known of the length: what memory answers late is asked for at once.
        first_pages = [walk.pages_of(first_item + ahead) for ahead in range(stages)]

        @pl.when(num_mine > 0)
        def _():
            end_item = walk.end_item(num_mine)

            @pl.when(group == 0)
            def _():
                for ahead, pages in enumerate(first_pages):
                    item = first_item + ahead
                    pl.when(item < end_item)(functools.partial(fetch, item, pages))

            splits.load_queries(plan, q, q_s, plain_s, q_ready, together, (b, tile, kv, group))
            queries = [
                jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
                for t in range(plan.tile_queries)
            ]
            row_position = splits.row_values(plan, plan.G, [positions[b, t] for t in queries])
            spread = lambda x: lax.broadcast_in_dim(x, (rows, columns), (0,))

            def all_groups():
                if groups > 1:
                    plgpu.barrier_arrive(together)
                    plgpu.barrier_wait(together)

            def visit(item, carry):
                best, total, out = carry
                slot = lax.rem(item, stages)
                pages = walk.pages_of(item + stages)  # early: memory answers while we compute
                plgpu.barrier_wait(k_ready.at[slot])
                keys = k_s.at[slot]
                if plan.fp8:  # each group widens its share of the columns
                    share_of_k = pl.ds(group * (plan.H // groups), plan.H // groups)
                    splits.widen(keys.at[:, share_of_k], wide_k[0].at[:, share_of_k])
                    keys = wide_k[0]
                    all_groups()

                def score(acc):
                    if plan.H <= _SCORE_COLUMNS:
                        plgpu.wgmma(acc, q_s, keys.transpose((1, 0)))
                        return acc[...]

                    # A loop, lest the descriptors of all steps take up registers.
                    @pl.loop(0, plan.H // _SCORE_COLUMNS)
                    def _(i):
                        part = pl.ds(i * _SCORE_COLUMNS, _SCORE_COLUMNS)
                        plgpu.wgmma(acc, q_s.at[:, part], keys.at[:, part].transpose((1, 0)))

                    return acc[...]

                scores = pl.run_scoped(score, plgpu.ACC((rows, key_block), jnp.float32))
                if plan.fp8:  # nobody reads the keys any more
                    all_groups()
                scores = splits.masked(plan, scores, walk.block_of(item) * key_block, row_position)
                new_best = jnp.maximum(best, scores.max(1))
                shrink = jnp.exp2(best - new_best)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_best, (rows, key_block), (0,)))
                total = total * shrink + weights.sum(1)
                plgpu.barrier_wait(v_ready.at[slot])
                values = v_s.at[slot, group]
                if plan.fp8:
                    splits.widen(values, wide_v[0].at[group])
                    values = wide_v[0].at[group]
                out = _accumulate(
                    out * spread(shrink),
                    weights.astype(jnp.bfloat16),
                    values,
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
                split = lax.fori_loop(start, end, visit, splits.nothing_yet(plan))
                if merges_inside:
                    return splits.merge(running, split, spread)
                parts, stats = outs
                best, total, out = split
                where = (b, kv, tile, walk.my_first + j * config.walks - walk.first_split)
                parts[(*where, slice(None), mine)] = out

                @pl.when((group == 0) & (share == 0))
                def _():
                    stats[(*where, 0)] = best
                    stats[(*where, 1)] = total

                return running

            running = splits.nothing_yet(plan) if merges_inside else ()
            running = lax.fori_loop(0, num_mine, one_split, running)
            if merges_inside:
                sink = splits.sink_values(plan, sinks, kv)
                result = splits.finish(running, sink, spread)
                staged = q_s.at[:, mine] if plan.aligned else plain_s.at[group]
                splits.store_result(plan, result, outs[0], staged, together, (b, tile, kv, mine))

    bf16 = jnp.bfloat16
    plain = [] if plan.aligned else [plgpu.SMEM((plan.H // columns, rows, columns), bf16)]
    copies_q = plan.tile_queries * (1 if plan.aligned else plan.H // columns)
    return plgpu.kernel(
        body,
        out_type=splits.result_type(plan),
        scratch_types=(
            plgpu.SMEM((rows, plan.H), bf16, transforms=_TILED),
            *plan.slots((plan.H,), _TILED),
            *plan.slots((groups, columns), plan.v_tiling),
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


def _accumulate(out, weights, values, interpret):
    """out + weights @ values. The interpreter has neither accumulators that start from a value, nor
    wgmma with an operand in registers."""
    if interpret is not None:
        product = jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # this read, unlike wgmma's, needs a fence before the next copy's write
        return out + product
    return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(out))
