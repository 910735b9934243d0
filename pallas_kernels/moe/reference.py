"""Definition of a mixture of experts: one expert after the other, over all rows.

Experts are visited in ascending id and each adds to the rows that chose it, in float32; a row that did
not choose it keeps its sum untouched, so no row's result depends on which others are in the call.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats

ALPHA = 1.702  # of GPT-OSS's sigmoid; its config does not state it


class ExpertWeights(NamedTuple):
    """One projection of every expert: values and scale as in `pallas_kernels.formats`.

    Shapes are those of `moe.api.moe`: gate_up values [E, 2, F, D], bias [E, 2, F]; down values
    [E, D, F], bias [E, D].
    """

    values: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None


def moe(
    x: jax.Array,  # [R, D]
    ids: jax.Array,  # [R, k]
    weights: jax.Array,  # [R, k]
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float | None,
) -> jax.Array:
    E = gate_up.values.shape[0]

    def visit(total, expert):  # [R, D] float32
        chosen = ids == expert  # [R, k], at most one a row
        share = jnp.where(chosen, weights, 0.0).sum(-1)

        def add(total):
            y = share[:, None] * _expert(x, _one(gate_up, expert), _one(down, expert), limit)
            return total + jnp.where(chosen.any(-1)[:, None], y, 0.0)

        return jax.lax.cond(chosen.any(), add, lambda total: total, total), None

    total, _ = jax.lax.scan(visit, jnp.zeros(x.shape, jnp.float32), jnp.arange(E))
    return total.astype(x.dtype)


def _one(weights: ExpertWeights, index: jax.Array | int) -> ExpertWeights:
    """Part `index` of the first axis: an expert, then gate or up."""
    return jax.tree.map(lambda leaf: leaf[index], weights)


def _expert(
    x: jax.Array, gate_up: ExpertWeights, down: ExpertWeights, limit: float | None
) -> jax.Array:
    """[R, D] -> float32 [R, D]."""
    gate, up = _linear(x, _one(gate_up, 0)), _linear(x, _one(gate_up, 1))
    return _linear(_activate(gate, up, limit).astype(x.dtype), down)


def _activate(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    if limit is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * gate * jax.nn.sigmoid(ALPHA * gate)


def _linear(x: jax.Array, weights: ExpertWeights) -> jax.Array:
    """x [R, K] times one matrix [N, K], plus its bias: float32 [R, N]."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jax.lax.dot_general(
        x,
        formats.dequantize(weights.values, weights.scale, x.dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y if weights.bias is None else y + weights.bias.astype(jnp.float32)
