"""Mixture of experts: which experts a row goes to, and the sum of what they make of it."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.moe import reference
from pallas_kernels.moe.reference import ExpertWeights


def route(
    logits: jax.Array,
    top_k: int,
    *,
    normalize: bool,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The `top_k` experts with the largest logits, ties to the lower id; each row for itself.

    With logits [0, 3, 1] and top_k 2 the ids are [1, 2]; weights are softmax([3, 1]) when normalised,
    else the second and third entry of softmax([0, 3, 1]).

    Args:
      logits: [R, E] float32.
      top_k: experts of a row.
      normalize: softmax over the chosen logits; else over all, and a row's weights sum to less than 1.
    Returns:
      (weights [R, k] float32, ids [R, k] int32), the largest first.
    Raises:
      ValueError: logits that are not float32 [R, E], or `top_k` experts are not among E.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [R, E]: {logits.dtype=} {logits.shape=}")
    E = logits.shape[1]
    if not 1 <= top_k <= E:
        raise ValueError(f"{top_k=} must lie between 1 and the number of experts, {E}")
    dispatch.resolve("moe.route", implementation)
    return reference.route(logits, top_k, normalize)


def moe(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    limit: float | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Each row's weighted sum over its experts of `down(activation(gate(x), up(x)))`.

    Products are of `x.dtype` with float32 accumulation; biases, activation and the sum over experts
    are float32. The router weight multiplies the expert's result, down's bias included. A row's result
    does not depend on the other rows.

    Args:
      x: [R, D].
      ids: [R, k] int32, the experts of a row, no two alike.
      weights: [R, k] float32.
      gate_up: values [E, 2, F, D] (gate first; mxfp4 [E, 2, F, D / 2]), bias [E, 2, F].
      down: values [E, D, F], bias [E, D].
      limit: None: `silu(gate) * up`. Else GPT-OSS's activation: with gate at most `limit` and up in
        [-limit, limit], `(up + 1) * gate * sigmoid(1.702 gate)`.
    Returns:
      [R, D] in `x.dtype`.
    Raises:
      ValueError: shapes that contradict each other, dtypes of no format.
    """
    _check(x, ids, weights, gate_up, down)
    dispatch.resolve("moe", implementation)
    return reference.moe(x, ids, weights, gate_up, down, limit)


def _check(x, ids, weights, gate_up: ExpertWeights, down: ExpertWeights) -> None:
    if x.ndim != 2:
        raise ValueError(f"rows of activations [R, D] are needed: {x.shape=}")
    R, D = x.shape
    if ids.ndim != 2 or ids.shape[0] != R or ids.shape != weights.shape:
        raise ValueError(f"{ids.shape=} and {weights.shape=} must both be [{R}, k], as {x.shape=}")
    if ids.dtype != jnp.int32 or weights.dtype != jnp.float32:
        raise ValueError(f"ids are int32 and weights float32: {ids.dtype=} {weights.dtype=}")
    shape = formats.logical_shape(gate_up.values, gate_up.scale)
    if len(shape) != 4 or shape[1] != 2 or shape[3] != D:
        raise ValueError(f"gate_up is {[*shape]} and must be [E, 2, F, {D}], as {x.shape=}")
    E, _, F, _ = shape
    shape = formats.logical_shape(down.values, down.scale)
    if shape != (E, D, F):
        raise ValueError(
            f"down is {[*shape]} and must be {[E, D, F]}, as gate_up is {[E, 2, F, D]}"
        )
    for name, bias, wanted in (("gate_up", gate_up.bias, (E, 2, F)), ("down", down.bias, (E, D))):
        if bias is not None and bias.shape != wanted:
            raise ValueError(f"{name}'s bias is {[*bias.shape]} and must be {[*wanted]}")
