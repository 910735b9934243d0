"""Arithmetic of attention in registers: scores, the softmax of a split, and the merge of two
splits.

A state is (best, total, out): the row maximum, the sum of weights, and the weighted sum of values.
Scores are in units of log2, so that `exp2` applies.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.verify_attention.mosaic_plan import AttentionPlan

MASKED = -1e30
# Initial row maximum: above MASKED, so that exp2(MASKED - NOTHING) is exactly 0.
NOTHING = -1e29
LOG2E = math.log2(math.e)


def masked(plan: AttentionPlan, scores: jax.Array, first_key, row_position) -> jax.Array:
    """Scaled and capped scores [rows, keys] in units of log2; MASKED at invisible keys.

    The first column is key `first_key`; a row sees keys up to `row_position` [rows].
    """
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plan.tile.layout)
    key = key + first_key
    limit = lax.broadcast_in_dim(row_position, scores.shape, (0,))
    visible = key <= limit
    if plan.window is not None:
        visible &= key > limit - plan.window
    return jnp.where(visible, _scaled(plan, scores), MASKED)


def unmasked(plan: AttentionPlan, scores: jax.Array, minus_zero: jax.Array) -> jax.Array:
    """`masked` for rows that see all the keys, with the same bits and without comparisons.

    `minus_zero` is a float32 -0.0 that the compiler does not know. Otherwise it would contract the
    product with the subtraction of the maximum that follows; it cannot contract a product through a
    mask.
    """
    return _scaled(plan, scores) + minus_zero


def _scaled(plan: AttentionPlan, scores: jax.Array) -> jax.Array:
    """Scaled scores in units of log2."""
    return scores * (plan.scale * LOG2E)


def weigh(best, total, scores):
    """Adds a key block to the softmax: (best, total, shrink, weights).

    `shrink` [rows] is the factor on the weighted sum of the blocks before, `weights` [rows, keys]
    those of the values.
    """
    new_best = jnp.maximum(best, scores.max(1))
    shrink = jnp.exp2(best - new_best)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_best, scores.shape, (0,)))
    return new_best, total * shrink + weights.sum(1), shrink, weights


def row_positions(plan: AttentionPlan, positions_gmem: Any, b: Any, tile: Any) -> jax.Array:
    """Position of each row of a tile, int32 [rows] in registers; positions_gmem [B, T]."""
    queries = [
        jnp.minimum(tile * plan.tile_queries + t, plan.T - 1) for t in range(plan.tile_queries)
    ]
    return row_values(plan, plan.G, [positions_gmem[b, t] for t in queries])


def sink_values(plan: AttentionPlan, sinks_gmem: Any, kv: Any) -> jax.Array | None:
    """Sink of each row, float32 [rows] in registers, in units of log2; sinks_gmem [N]. None without
    sinks."""
    if not plan.has_sinks:
        return None
    sink = [sinks_gmem[kv * plan.G + g].astype(jnp.float32) * LOG2E for g in range(plan.G)]
    return row_values(plan, 1, sink)


def row_values(plan: AttentionPlan, repeat: int, values) -> jax.Array:
    """[rows] in registers: row r holds values[(r // repeat) % len(values)]."""
    rows = plan.tile.rows
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plan.tile.layout.reduce(1))
    out = jnp.where(row < rows, values[0], values[0])  # a plain constant has no register layout
    for start in range(repeat, plan.tile_rows, repeat):
        out = jnp.where(row >= start, values[start // repeat % len(values)], out)
    return out


def initial_state(plan: AttentionPlan):
    """Initial (best, total, out), before any key."""
    rows, layout = plan.tile.rows, plan.tile.layout
    full = lambda shape, x, layout: plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)
    return (
        full((rows,), NOTHING, layout.reduce(1)),
        full((rows,), 0.0, layout.reduce(1)),
        full((rows, plan.columns), 0.0, layout),
    )


def merge(running, split, spread):
    """Merges a split into the running (best, total, out); `spread` broadcasts [rows] to out's
    shape.

    Only the side with the lower maximum is rescaled. Each sum has a single product, which every
    compiler contracts to an FMA. With two products, the two kernels could contract different ones
    and round apart.
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
    """Adds the sink (a key without a value; None: no sink) and divides by the softmax
    denominator."""
    best, total, out = running
    if sink is not None:
        new_best = jnp.maximum(best, sink)
        old = jnp.exp2(best - new_best)
        total = total * old + jnp.exp2(sink - new_best)
        out = out * spread(old)
    return (out / spread(total)).astype(jnp.bfloat16)
