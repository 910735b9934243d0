"""Paged attention for Blackwell: tcgen05 over key blocks brought by TMA, a whole split at a time.

A thread block owns up to 128 rows and 128 columns of the output, a thread to a row, so that nothing is
reduced across threads. The scores of all keys of a split come to lie side by side in tensor memory; only
then a row's best is taken, and the weights go back there as the first operand of the product with V.
So nothing is rescaled within a split. How rows, keys and splits are cut is said in `mosaic_splits`.

  tensor memory, columns   scores 256 (float32), weights 128 (bfloat16), output 64 or 128 (float32)

One warpgroup copies, multiplies and computes. A slot of keys is filled again while the product after it
is under way, V of a split arrives while its scores are made, and K of the next one during the softmax.
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

TILE = splits.Tile(rows=128, groups=1, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE)
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_SPLIT = 256


def choose_config(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    table_size: int,
    window: int | None,
    device: Device,
) -> TuningConfig:
    """Tuning for q of `shape` [B, T, N, H] over page tables of `table_size` positions."""
    H = shape[3]
    key_block = 32 if H > 256 else 64
    # What fits beside 128 rows of q: tensor memory leaves room for one thread block anyway.
    stages = {64: 8, 128: 4, 256: 2, 512: 2}[H]
    walks = splits.choose_walks(shape, kv_heads, table_size, window, TILE, device.num_sms)
    return TuningConfig(key_block, _SPLIT, stages, walks)


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
    rows, layout = TILE.rows, TILE.layout
    key_block, columns, stages = config.key_block, plan.columns, config.stages
    per = plan.blocks_per_split
    kinds = 2 if plan.fp8 else 1
    # Keys that a thread works on at a time: a soft cap, or pages in fp8, leave registers for fewer.
    width = 32 if plan.soft_cap is not None or plan.fp8 else key_block
    pieces = key_block // width

    def body(q, k_pages, v_pages, table, positions, *rest):
        sinks, rest = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        outs, rest = (rest[:1], rest[1:]) if merges_inside else (rest[:2], rest[2:])
        q_s, scores_t, weights_t, out_t, q_ready, together, *rest = rest
        k_ready, v_ready, k_done, v_done, *rest = rest
        (k_s, *wide_k), (v_s, *wide_v) = rest[:kinds], rest[kinds : 2 * kinds]
        plain_s = None if plan.aligned else rest[-1]
        b, number, tile, kv = (lax.axis_index(name) for name in ("batch", "walk", "tile", "head"))
        mine = pl.ds(lax.axis_index("share") * columns, columns)
        walk = splits.Walk.of(plan, table, positions, b, number, tile)
        num_mine = walk.num_splits

        def fetch_k(item, pages):
            slot = lax.rem(item, stages)
            for where, keys in walk.sources(item, pages):
                plgpu.copy_gmem_to_smem(
                    k_pages.at[(*where, kv)], k_s.at[slot, keys], k_ready.at[slot]
                )

        def fetch_v(item, pages):
            slot = lax.rem(item, stages)
            for where, keys in walk.sources(item, pages):
                plgpu.copy_gmem_to_smem(
                    v_pages.at[(*where, kv, mine)], v_s.at[slot, keys], v_ready.at[slot]
                )

        first_item = walk.first_item
        # Before anything is known of the length: what memory answers late is asked for at once.
        first_pages = [walk.pages_of(first_item + ahead) for ahead in range(stages)]

        @pl.when(num_mine > 0)
        def _():
            end_item = walk.end_item(num_mine)
            for fetch in (fetch_k, fetch_v):
                for ahead, pages in enumerate(first_pages):
                    item = first_item + ahead
                    pl.when(item < end_item)(functools.partial(fetch, item, pages))

            splits.load_queries(plan, q, q_s, plain_s, q_ready, together, (b, tile, kv, 0))
            queries = [
                jnp.minimum(tile * plan.tile_queries + t, plan.T - 1)
                for t in range(plan.tile_queries)
            ]
            row_position = splits.row_values(plan, plan.G, [positions[b, t] for t in queries])
            spread = lambda x: lax.broadcast_in_dim(x, (rows, columns), (0,))
            in_split = lambda item: pl.ds(lax.rem(item, per) * key_block, key_block)

            def multiply(start, end, fetch, ready, done, product):
                """`product` of each item; a slot is filled again when the next product is under way."""

                def refill(item, pages):
                    plgpu.barrier_wait(done.at[lax.rem(item, stages)])
                    again = item + stages
                    pl.when(again < end_item)(functools.partial(fetch, again, pages))

                def one(item, pages):
                    slot = lax.rem(item, stages)
                    next_pages = walk.pages_of(item + stages)  # early: memory answers meanwhile
                    after = lambda: pl.when(item > start)(lambda: refill(item - 1, pages))
                    if plan.fp8:  # only one block at a time is there in bfloat16
                        after()
                    plgpu.barrier_wait(ready.at[slot])
                    product(item, slot)
                    if not plan.fp8:
                        after()
                    return next_pages

                refill(end - 1, lax.fori_loop(start, end, one, walk.pages_of(start + stages)))

            def as_bfloat16(block, wide):
                """A key block as products read it."""
                if not plan.fp8:
                    return block
                splits.widen(block, wide[0])
                return wide[0]

            def score(item, slot):
                keys = as_bfloat16(k_s.at[slot], wide_k)
                plgpu.tcgen05_mma(
                    scores_t.at[:, in_split(item)],
                    q_s,
                    keys.transpose((1, 0)),
                    k_done.at[slot],
                    accumulate=False,
                )

            def load_scores(piece):
                here = pl.ds(lax.rem(piece, per * pieces) * width, width)
                scores = plgpu.async_load_tmem(scores_t.at[:, here], layout=layout)
                first = walk.block_of(lax.div(piece, pieces)) * key_block
                first = first + lax.rem(piece, pieces) * width
                return here, splits.masked(plan, scores, first, row_position)

            def softmax(start, end):
                """(best, total) of a split, whose weights go to tensor memory."""
                best, total, _ = splits.nothing_yet(plan)
                highest = lambda piece, best: jnp.maximum(best, load_scores(piece)[1].max(1))
                best = lax.fori_loop(start * pieces, end * pieces, highest, best)

                def weigh(piece, total):
                    here, scores = load_scores(piece)
                    weights = jnp.exp2(scores - lax.broadcast_in_dim(best, (rows, width), (0,)))
                    plgpu.async_store_tmem(weights_t.at[:, here], weights.astype(jnp.bfloat16))
                    return total + weights.sum(1)

                total = lax.fori_loop(start * pieces, end * pieces, weigh, total)
                plgpu.wait_load_tmem()
                plgpu.commit_tmem()
                return best, total

            def one_split(j, running):
                start = jnp.maximum(j * per, first_item)
                end = jnp.minimum((j + 1) * per, end_item)
                multiply(start, end, fetch_k, k_ready, k_done, score)
                best, total = softmax(start, end)

                def weighted(item, slot):
                    values = as_bfloat16(v_s.at[slot], wide_v)
                    plgpu.tcgen05_mma(
                        out_t,
                        weights_t.at[:, in_split(item)],
                        values,
                        v_done.at[slot],
                        accumulate=item > start,
                    )

                multiply(start, end, fetch_v, v_ready, v_done, weighted)
                out = plgpu.async_load_tmem(out_t, layout=layout)
                if merges_inside:
                    running = splits.merge(running, (best, total, out), spread)
                    plgpu.wait_load_tmem()
                    return running
                parts, stats = outs
                where = (b, kv, tile, walk.my_first + j * config.walks - walk.first_split)
                parts[(*where, slice(None), mine)] = out
                plgpu.wait_load_tmem()

                @pl.when(lax.axis_index("share") == 0)
                def _():
                    stats[(*where, 0)] = best
                    stats[(*where, 1)] = total

                return running

            running = splits.nothing_yet(plan) if merges_inside else ()
            running = lax.fori_loop(0, num_mine, one_split, running)
            if merges_inside:
                sink = splits.sink_values(plan, sinks, kv)
                result = splits.finish(running, sink, spread)
                # Through tensor memory to the layout that swizzled memory takes without conflicts.
                plgpu.async_store_tmem(out_t, result.astype(jnp.float32))
                plgpu.commit_tmem()
                result = plgpu.async_load_tmem(out_t, layout=plgpu.Layout.TCGEN05)
                result = result.astype(jnp.bfloat16)
                staged = q_s.at[:, mine] if plan.aligned else plain_s.at[0]
                splits.store_result(plan, result, outs[0], staged, together, (b, tile, kv, mine))

    bf16 = jnp.bfloat16
    chunks = plan.H // columns
    plain = [] if plan.aligned else [plgpu.SMEM((chunks, rows, columns), bf16)]
    keys, values = plan.slots((plan.H,), _TILED), plan.slots((columns,), plan.v_tiling)
    copied = lambda: plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages)
    multiplied = lambda: plgpu.Barrier(num_barriers=stages, orders_tensor_core=True)
    return plgpu.kernel(
        body,
        out_type=splits.result_type(plan),
        scratch_types=(
            plgpu.SMEM((rows, plan.H), bf16, transforms=_TILED),
            plgpu.TMEM((rows, config.split), jnp.float32),
            plgpu.TMEM((rows, config.split), bf16, packed=True),
            plgpu.TMEM((rows, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=plan.tile_queries * (1 if plan.aligned else chunks)),
            plgpu.Barrier(),
            copied(),
            copied(),
            multiplied(),
            multiplied(),
            *keys,
            *values,
            *plain,
        ),
        grid=(plan.B, config.walks, plan.tiles, plan.K, plan.shares),
        grid_names=("batch", "walk", "tile", "head", "share"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="verify_attention",
    )
