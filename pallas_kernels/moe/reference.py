"""Reference of routing and of a mixture of experts: a loop over the experts.

A row's result does not depend on the other rows. Experts are visited by ascending id; each adds
only to the rows that chose it. An expert's result, bias included, is rounded to the activations'
dtype, then weighted and added in float32. Products always have `ROWS` rows, because XLA chooses the
order of a sum over K by the shape of the whole product (on a CPU for one row, one column, or few
columns and many K).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.activations import Activations, result_dtype, rounding
from pallas_kernels.block_gemm.reference import product

ALPHA = 1.702  # sigmoid factor of GPT-OSS; not in its config
ROWS = 8
"""Rows per product; the last block is padded with zero rows that chose no expert."""


class ExpertWeights(NamedTuple):
    """One projection of every expert: values and scale as in `pallas_kernels.formats`.

    Shapes are those of `moe.api.moe`: gate_up values [E, 2, F, D], bias [E, 2, F]; down values
    [E, D, F], bias [E, D].
    """

    values: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None


def route(logits: jax.Array, top_k: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """logits [R, E] -> weights [R, k], ids [R, k]."""
    chosen, ids = jax.lax.top_k(logits, top_k)  # ties: the lower id first
    powers = jnp.exp(chosen - chosen[:, :1])
    total = powers if normalize else jnp.exp(logits - chosen[:, :1])
    return powers / _sum(total), ids


def _sum(x: jax.Array) -> jax.Array:
    """Pairwise sum [R, n] -> [R, 1]. XLA orders a reduction by the number of rows, but not these
    adds."""
    while (n := x.shape[1]) > 1:
        x = jnp.pad(x, ((0, 0), (0, n % 2)))
        x = x[:, : (n + 1) // 2] + x[:, (n + 1) // 2 :]
    return x


def moe(
    x: jax.Array,  # [R, D]
    ids: jax.Array,  # [R, k]
    weights: jax.Array,  # [R, k]
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float | None,
    activations: Activations = "bf16",
) -> jax.Array:
    R, D = x.shape
    E = gate_up.values.shape[0]
    x, weights = _blocks(x, 0), _blocks(weights, 0)
    ids = _blocks(ids, -1)

    def visit(total, expert):  # [blocks, ROWS, D] float32
        chosen = ids == expert  # [blocks, ROWS, k], at most one a row
        share = jnp.where(chosen, weights, 0).sum(-1)[..., None]

        def add(total):
            y = _expert(x, _one(gate_up, expert), _one(down, expert), limit, activations)
            return jnp.where(chosen.any(-1)[..., None], total + share * y, total)

        return jax.lax.cond(chosen.any(), add, lambda total: total, total), None

    total, _ = jax.lax.scan(visit, jnp.zeros(x.shape, jnp.float32), jnp.arange(E))
    return total.reshape(-1, D)[:R].astype(result_dtype(x.dtype))


def _blocks(rows: jax.Array, filler: int) -> jax.Array:
    """[R, n] -> [ceil(R / ROWS), ROWS, n]."""
    R, n = rows.shape
    rows = jnp.pad(rows, ((0, -R % ROWS), (0, 0)), constant_values=filler)
    return rows.reshape(-1, ROWS, n)


def _one(weights: ExpertWeights, expert: jax.Array) -> ExpertWeights:
    return jax.tree.map(lambda leaf: leaf[expert], weights)


def _expert(
    x: jax.Array,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    limit: float | None,
    activations: Activations,
) -> jax.Array:
    """One expert on all rows: [blocks, ROWS, D] -> the same shape, in `result_dtype(x.dtype)`."""
    dtype = result_dtype(x.dtype)
    if x.dtype == jnp.float16:  # a scaled weight may be too small for float16
        x = x.astype(jnp.float32)
    read_x, x_dtype = _reader(gate_up, activations, x.dtype)
    read_inner, inner_dtype = _reader(down, activations, dtype)
    gate, up = formats.dequantize(gate_up.values, gate_up.scale, x_dtype)
    gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias
    out = formats.dequantize(down.values, down.scale, inner_dtype)

    def block(rows):  # [ROWS, D]
        rows = read_x(rows)
        inner = _activate(_linear(rows, gate, gate_bias), _linear(rows, up, up_bias), limit)
        return _linear(read_inner(inner.astype(dtype)), out, down.bias).astype(dtype)

    return jax.lax.map(block, x)


def _reader(
    weight: ExpertWeights, activations: Activations, dtype: jnp.dtype
) -> tuple[Callable[[jax.Array], jax.Array], jnp.dtype]:
    """What rounds the rows that a weight multiplies, and the dtype of both operands."""
    round_rows = rounding(activations, weight.values, weight.scale)
    if round_rows is None:
        return lambda rows: rows, dtype
    return round_rows, jnp.float32


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x [ROWS, K] times weight [N, K], plus its bias: float32 [ROWS, N]."""
    y = product(x, weight, jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def _activate(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    if limit is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
