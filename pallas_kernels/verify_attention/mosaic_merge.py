"""Attention from the walk kernel of a chip, and the kernel that merges stored splits.

The merge kernel adds the splits of a row in ascending order, with the formula that a single walk
uses in registers, so both give the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.verify_attention.mosaic_plan import (
    AttentionPlan,
    Tile,
    TuningConfig,
    make_plan,
)
from pallas_kernels.verify_attention.mosaic_softmax import LOG2E, NOTHING, finish, merge
from pallas_kernels.verify_attention.mosaic_walk import span

_LOADS = 4
"""Splits whose loads are under way at once, before the first of them is merged."""
_MORE_LOADS = 8
"""The same with more than twice as many splits and at most `_MOST_BLOCKS` thread blocks."""
_MOST_BLOCKS = 512
"""Thread blocks that run at once on every chip with up to 128 registers a thread. `_MORE_LOADS`
take 62 to 92 instead of 40 to 66, by head dim."""


class Chip(NamedTuple):
    """Attention of one generation of GPUs."""

    tile: Tile
    choose_config: Callable[..., TuningConfig]
    """(shape of q, KV heads, positions of a page table, window, device, whether pages are e4m3) ->
    tuning."""
    walk_kernel: Callable[[AttentionPlan, Any], Callable]
    """(plan, interpret) -> the kernel that walks over keys."""


@functools.partial(jax.jit, static_argnames=("chip", "scale", "window", "launch", "config"))
def verify_attention(
    chip: Chip,
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
    """`api.verify_attention` by the kernels of a chip; without `config` the chip chooses it."""
    if config is None:
        Z, K = k_pages.shape[1:3]
        table_size = page_table.shape[1] * Z
        fp8 = k_pages.dtype == jnp.float8_e4m3fn
        config = chip.choose_config(q.shape, K, table_size, window, launch.device, fp8)
    plan = make_plan(
        q,
        k_pages,
        page_table,
        chip.tile,
        config,
        scale=float(scale),
        window=window,
        has_sinks=sinks is not None,
    )
    page_table, positions = page_table.astype(jnp.int32), positions.astype(jnp.int32)
    grouped = q.reshape(plan.B, plan.T, plan.K, plan.G, plan.H)
    own_sinks = () if sinks is None else (sinks,)
    walk = chip.walk_kernel(plan, launch.interpret)
    results = walk(grouped, k_pages, v_pages, page_table, positions, *own_sinks)
    if plan.merges_inside:
        return results.reshape(q.shape)
    parts, stats = results
    parts = parts.reshape(*parts.shape[:-2], plan.tile_rows * plan.H)
    out = _merge_kernel(plan, launch.interpret)(parts, stats, positions, *own_sinks)
    return out.reshape(q.shape)


def _merge_kernel(plan: AttentionPlan, interpret: Any) -> Callable:
    """The merge kernel of stored splits: (parts, stats, positions[, sinks]) -> out."""
    heads = max(1, 128 // plan.H)  # heads per thread block
    width = heads * plan.H
    num_blocks = plan.B * plan.T * plan.N // heads
    loads_more = plan.max_splits > 2 * _MORE_LOADS and num_blocks <= _MOST_BLOCKS

    def body(
        parts_gmem,  # [B, K, tiles, splits, tile_rows * H] float32
        stats_gmem,  # [B, K, tiles, splits, 2, rows] float32: best, total
        positions_gmem,  # [B, T] int32
        *refs,  # sinks [N], if any; out bfloat16 [B, T, N * H]
    ):
        sinks_gmem, (out_gmem,) = (refs[0], refs[1:]) if plan.has_sinks else (None, refs)
        b, query, pack = (lax.axis_index(name) for name in ("batch", "query", "pack"))
        kv, g = lax.div(pack * heads, plan.G), lax.rem(pack * heads, plan.G)
        tile = lax.div(query, plan.tile_queries)
        row = lax.rem(query, plan.tile_queries) * plan.G + g
        _, _, first, last = span(plan, positions_gmem, b, tile)
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

        def some_splits(loads, start, i, running):
            # Issue all loads before the first merge, to hide their latency.
            for split in [load(start + i * loads + j) for j in range(loads)]:
                running = merge(running, split, lambda x: x)
            return running

        running, start, count = tuple(map(constant, (NOTHING, 0.0, 0.0))), 0, last - first + 1
        if loads_more:
            rounds = lax.div(count, _MORE_LOADS)
            more = functools.partial(some_splits, _MORE_LOADS, 0)
            running, start = lax.fori_loop(0, rounds, more, running), rounds * _MORE_LOADS
        rounds = lax.div(count - start + _LOADS - 1, _LOADS)
        some = functools.partial(some_splits, _LOADS, start)
        running = lax.fori_loop(0, rounds, some, running)
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
