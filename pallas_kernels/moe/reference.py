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
from pallas_kernels.block_gemm.api import add_in_order
from pallas_kernels.block_gemm.reference import product

ALPHA = 1.702  # sigmoid factor of GPT-OSS; not in its config
ROWS = 8
"""Rows per product; the last block is padded with zero rows that chose no expert."""


class ExpertWeights(NamedTuple):
    """One projection of every expert: values and scale as in `pallas_kernels.formats`.

    Attributes:
      values: gate_up [E, 2, F, D], gate first, mxfp4 [E, 2, F, D / 2]; down [E, D, F].
      bias: gate_up [E, 2, F], down [E, D].
    """

    values: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None


class Experts(NamedTuple):
    """Experts that compute `down(activation(gate(x), up(x)))`.

    Products have float32 accumulation; biases and activation are float32. Rows of down and results
    are rounded to the dtype of the stream (`activations.result_dtype`).

    Attributes:
      limit: None: `silu(gate) * up`. Else GPT-OSS's activation: with gate at most `limit` and up in
        [-limit, limit], `(up + 1) * gate * sigmoid(1.702 gate)`.
      activations: "fp8" quantises the rows that fp8 weights multiply
        (`pallas_kernels.activations`).
      first: [] int32. The experts are those from here on, and others are left out: their parts of a
        mixture have weight 0 and no value. None: all experts are there.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    limit: float | None = None
    activations: Activations = "bf16"
    first: jax.Array | None = None


class Choice(NamedTuple):
    """The choice of a row's experts by its logits.

    Attributes:
      top_k: experts per row.
      normalize: weights are the softmax over the chosen logits; otherwise over all, and the weights
        sum to less than 1.
      bias: [E], added to the logits, or None.
    """

    top_k: int
    normalize: bool
    bias: jax.Array | None = None


class Mixture(NamedTuple):
    """Results of the experts before the sum: row r is `sum_j weights[j, r] values[rows[j, r]]`, in
    float32.

    Attributes:
      values: [slots, D] in the dtype of the stream.
      weights: [k, R'] float32, R' >= R; entries past R are unspecified.
      rows: [k, R'] int32.
    """

    values: jax.Array
    weights: jax.Array
    rows: jax.Array

    def added(self, num_rows: int) -> jax.Array:
        """The sum [R, D], rounded once to the dtype of `values`; parts of weight 0 need no
        value."""
        weights = self.weights[:, :num_rows, None]
        parts = self.values[self.rows[:, :num_rows]] * weights
        return add_in_order(jnp.where(weights != 0, parts, 0)).astype(self.values.dtype)


def mixture(x: jax.Array, logits: jax.Array, choice: Choice, experts: Experts) -> Mixture:
    """The mixture of rows x [R, D] with logits [R, E], added already: each row has one part."""
    weights, ids = choose(logits, choice, experts)
    values = moe(x, ids, weights, experts.gate_up, experts.down, experts.limit, experts.activations)
    rows = jnp.arange(len(x), dtype=jnp.int32)[None]
    return Mixture(values, jnp.ones(rows.shape, jnp.float32), rows)


def choose(logits: jax.Array, choice: Choice, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Weights [R, k] and ids [R, k] among `experts`; those that are not there have 0 and -1."""
    if choice.bias is not None:
        logits = logits + choice.bias.astype(jnp.float32)
    weights, ids = route(logits, choice.top_k, choice.normalize)
    if experts.first is None:
        return weights, ids
    local = ids - experts.first
    is_own = (local >= 0) & (local < len(experts.gate_up.values))
    return jnp.where(is_own, weights, 0.0), jnp.where(is_own, local, -1)


def route(logits: jax.Array, top_k: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """logits [R, E] float32 -> weights [R, k] float32, ids [R, k] int32, the largest first.

    Ties go to the lower id. Experts with a logit of -inf come last and have weight 0, unless a row
    has no others. With logits [0, 3, 1] and top_k 2 the ids are [1, 2]; weights are softmax([3, 1])
    when normalised, else the second and third entry of softmax([0, 3, 1]).
    """
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
    """Each row's weighted sum over its experts, in float32, then rounded: [R, D]."""
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
        inner = activate(_linear(rows, gate, gate_bias), _linear(rows, up, up_bias), limit)
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


def activate(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    if limit is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
