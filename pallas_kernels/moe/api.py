"""Mixture of experts: routing of rows, and the weighted sum of the experts' results."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.activations import Activations, are_quantized, dtype_refusal, whole_tiles
from pallas_kernels.block_gemm.api import CHIPS_OF, add_in_order
from pallas_kernels.moe import reference
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.moe.worklist import Worklist, make_worklist, most_items, own_items
from pallas_kernels.quantize import api as quantized_rows

CHIPS = (90, 100, 120)
"""Generations (`Device.sm`) with kernels for experts and for routing."""


def route(
    logits: jax.Array,
    top_k: int,
    *,
    normalize: bool,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the `top_k` experts with the largest logits for each row; ties go to the lower id.

    Experts with a logit of -inf come last and have weight 0, unless a row has no others.

    With logits [0, 3, 1] and top_k 2 the ids are [1, 2]; weights are softmax([3, 1]) when
    normalised, else the second and third entry of softmax([0, 3, 1]).

    Args:
      logits: [R, E] float32.
      top_k: experts per row.
      normalize: softmax over the chosen logits; otherwise over all, and the weights sum to less
        than 1.
    Returns:
      (weights [R, k] float32, ids [R, k] int32), the largest first.
    Raises:
      ValueError: logits are not float32 [R, E], or `top_k` is not in 1 .. E.
      NotImplementedError: the kernel is requested where none exists.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [R, E]: {logits.dtype=} {logits.shape=}")
    E = logits.shape[1]
    if not 1 <= top_k <= E:
        raise ValueError(f"{top_k=} must lie between 1 and the number of experts, {E}")
    refusal = None
    if implementation is None and E % 32:  # no GPU has run other numbers
        refusal = f"the number of experts must be a multiple of 32, not {E}"
    launch = dispatch.resolve("moe.route", implementation, chips=CHIPS, refusal=refusal)
    if launch is None:
        return reference.route(logits, top_k, normalize)
    from pallas_kernels.moe import mosaic_route  # a slow import that CPU use does not need

    R = logits.shape[0]
    weights, ids = mosaic_route.route(logits, None, top_k, normalize, launch)
    return weights[:, :R].T, ids[:, :R].T


def moe(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    limit: float | None = None,
    activations: Activations = "bf16",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Each row's weighted sum over its experts of `down(activation(gate(x), up(x)))`.

    Products have float32 accumulation; biases, activation and the sum over experts are float32. The
    router weight multiplies the expert's result, which includes down's bias. Rows of down and
    results are rounded to the dtype of the stream (`activations.result_dtype`). A row's result does
    not depend on the other rows.

    Args:
      x: [R, D] in the dtype of the stream, or in `row_dtype` of gate_up.
      ids: [R, k] int32, the distinct experts of each row.
      weights: [R, k] float32.
      gate_up: values [E, 2, F, D] (gate first; mxfp4 [E, 2, F, D / 2]), bias [E, 2, F].
      down: values [E, D, F], bias [E, D].
      limit: None: `silu(gate) * up`. Else GPT-OSS's activation: with gate at most `limit` and up in
        [-limit, limit], `(up + 1) * gate * sigmoid(1.702 gate)`.
      activations: "fp8" quantises the rows that fp8 weights multiply
        (`pallas_kernels.activations`).
    Returns:
      [R, D] in the dtype of the stream.
    Raises:
      ValueError: inconsistent shapes, or dtypes that match no format.
    """
    _check(x, ids, weights, gate_up, down)
    launch = resolve(x, gate_up, down, activations, implementation, gate_up.values.shape[0])
    if launch is None:
        return reference.moe(x, ids, weights, gate_up, down, limit, activations)
    R, E = x.shape[0], gate_up.values.shape[0]
    if launch.device.platform == "tpu":
        values, slots = _experts_on_tpu(x, ids.T, gate_up, down, limit, launch)
        return add_in_order(values[slots] * weights.T[..., None]).astype(x.dtype)
    config = config_for(R, E, ids.shape[1], (gate_up, down), activations, launch)
    work = make_worklist(ids.T, E, config.tokens, config.shared)
    values = run_experts(x, work, gate_up, down, limit, config, launch, activations)
    return add_in_order(values[work.slots] * weights.T[..., None]).astype(values.dtype)


class Mixture(NamedTuple):
    """Results of the experts before the sum: row r is `sum_j weights[j, r] values[rows[j, r]]`, in
    float32.

    Attributes:
      values: [P, D] in the dtype of the stream.
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


class ExpertForm(NamedTuple):
    """How experts compute: `limit` and `activations` as in `moe`."""

    limit: float | None = None
    activations: Activations = "bf16"


DEFAULT_FORM = ExpertForm()


def mixture(
    x: jax.Array,
    logits: jax.Array,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    router_bias: jax.Array | None,
    top_k: int,
    normalize: bool,
    form: ExpertForm = DEFAULT_FORM,
    first: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Mixture:
    """Routes rows and runs their experts; the consumer computes the weighted sum.

    Args:
      x: as in `moe`.
      logits: float32 [R, E], without the router's bias.
      gate_up, down: as in `moe`.
      router_bias: [E] or None.
      top_k, normalize: as in `route`.
      form: how the experts compute.
      first: [] int32. `gate_up` and `down` are those of the experts from here on, and other experts
        are left out: their parts have weight 0 and no value. None: all E experts are there.
    Returns:
      k parts per row, or one from the reference, which adds them already.
    Raises:
      ValueError: as in `route` and `moe`.
    """
    R, E = logits.shape
    limit, activations = form
    launch = resolve(x, gate_up, down, activations, implementation, E)
    if launch is None or launch.device.platform == "tpu":
        if router_bias is not None:
            logits = logits + router_bias.astype(jnp.float32)
        how = implementation if launch is None else "reference"  # a TPU has no kernel for it
        weights, ids = route(logits, top_k, normalize=normalize, implementation=how)
        if first is not None:
            local = ids - first
            is_own = (local >= 0) & (local < gate_up.values.shape[0])
            ids, weights = jnp.where(is_own, local, -1), jnp.where(is_own, weights, 0.0)
        _check(x, ids, weights, gate_up, down)
        if launch is not None:
            values, slots = _experts_on_tpu(x, ids.T, gate_up, down, limit, launch)
            return Mixture(values, weights.T, slots)
        values = reference.moe(x, ids, weights, gate_up, down, limit, activations)
        slots = jnp.arange(R, dtype=jnp.int32)[None]
        return Mixture(values, jnp.ones(slots.shape, jnp.float32), slots)
    config = config_for(R, E, top_k, (gate_up, down), activations, launch)
    own = None if first is None else (first, gate_up.values.shape[0])
    weights, work = _routed(logits, router_bias, top_k, normalize, own, config, launch)
    rules = config, launch, activations, own is not None
    values = run_experts(x, work, gate_up, down, limit, *rules)
    return Mixture(values, weights, work.slots)


def _routed(
    logits, router_bias, top_k: int, normalize: bool, own, config, launch
) -> tuple[jax.Array, Worklist]:
    """Weights [k, R'] and the worklist of the rows of `logits`, by kernels; R' >= R.

    `own` is None or (first, count): only the items of these experts, as `own_items`.
    """
    # Imported here: slow imports that CPU use does not need.
    from pallas_kernels.moe import mosaic_place, mosaic_plan, mosaic_route

    R, E = logits.shape
    cut = dict(tokens=config.tokens, shared=config.shared)
    items = most_items(R, E, top_k, **cut)
    how = dict(top_k=top_k, normalize=normalize, items=items, launch=launch)
    if mosaic_plan.fits(R, E, top_k):
        first, count = own or (None, None)
        weights, slots, experts, num_items = mosaic_plan.route_and_plan(
            logits, router_bias, first, count=count, **how, **cut
        )
        return weights, Worklist(experts, num_items, slots, items)
    if mosaic_place.fits(R, E, launch.device) and not config.shared:
        weights, slots, experts, num_items = mosaic_place.route_and_place(
            logits, router_bias, tokens=config.tokens, **how
        )
        work = Worklist(experts, num_items, slots, items)
    else:
        weights, ids = mosaic_route.route(logits, router_bias, top_k, normalize, launch)
        weights, work = weights[:, :R], make_worklist(ids[:, :R], E, **cut)
    if own is not None:
        work, weights = own_items(work, weights, *own, config.tokens)
    return weights, work


def resolve(
    x, gate_up: ExpertWeights, down: ExpertWeights, activations: Activations, implementation, E: int
):
    """`E` is the number of experts to choose from, of which the weights may be a share."""
    refusal = formats.kernel_refusal(gate_up.values, gate_up.scale)
    refusal = refusal or formats.kernel_refusal(down.values, down.scale)
    if implementation is None:
        refusal = refusal or formats.compile_refusal(gate_up.values, gate_up.scale)
        refusal = refusal or formats.compile_refusal(down.values, down.scale)
        if E % 32:
            refusal = f"the number of experts must be a multiple of 32, not {E}"
    refusal = dtype_refusal(x.dtype, gate_up.values, gate_up.scale) or refusal
    quantized = any(are_quantized(activations, w.values, w.scale) for w in (gate_up, down))
    kinds = {formats.kind(weight.values, weight.scale) for weight in (gate_up, down)}
    if quantized and x.shape[1] % 64:
        refusal = f"quantised rows are copied in units of 64 columns, not {x.shape[1]}"
    tpu_refusal = None
    if dispatch.platform() == "tpu" or implementation == "mosaic_tpu":
        from pallas_kernels.moe import mosaic_tpu  # a slow import that other platforms do not need

        tpu_refusal = mosaic_tpu.refusal(x, gate_up, down)
        if quantized:
            tpu_refusal = "it has no kernel for fp8 activations on a TPU"
    chips = next((CHIPS_OF[kind] for kind in kinds if kind in CHIPS_OF), CHIPS)
    return dispatch.resolve(
        "moe", implementation, chips=chips, refusal=refusal, tpu_refusal=tpu_refusal
    )


def _experts_on_tpu(x, ids, gate_up, down, limit, launch) -> tuple[jax.Array, jax.Array]:
    """Results of all items [P, D] for ids [k, R], and the slots [k, R] of each row in them."""
    from pallas_kernels.moe import mosaic_tpu

    shared = x.shape[0] <= mosaic_tpu.TOKENS
    work = make_worklist(ids, gate_up.values.shape[0], mosaic_tpu.TOKENS, shared)
    return mosaic_tpu.experts(x, work, shared, gate_up, down, limit, launch), work.slots


def config_for(R: int, E: int, top_k: int, weights, activations: Activations, launch):
    """Tile sizes for the experts of `weights`, (gate_up, down)."""
    from pallas_kernels.moe import mosaic_gpu  # a slow import that CPU use does not need

    quantized = [are_quantized(activations, w.values, w.scale) for w in weights]
    is_mixed = any(quantized) and not all(quantized)
    # Mixed products keep the powers of two up to 64, which both forms take.
    hopper = launch.device.sm == 90 and not is_mixed
    forms = dict(hopper=hopper, quantized=all(quantized))
    forms["tiled"] = all(formats.kind(w.values, w.scale) == "fp8_tiles" for w in weights)
    return mosaic_gpu.TuningConfig.choose(R, E, top_k, **forms)


def run_experts(
    x,
    work: Worklist,
    gate_up,
    down,
    limit,
    config,
    launch,
    activations: Activations,
    is_share: bool = False,
) -> jax.Array:
    """Results of all items, bfloat16 [P, D]. Rows without a slot are undefined and are never read.

    `is_share`: the worklist is that of `own_items`.
    """
    from pallas_kernels.moe import mosaic_gpu, mosaic_route

    scale, inner_scale = None, None
    quantized = are_quantized(activations, gate_up.values, gate_up.scale)
    if config.shared:
        x = whole_tiles(x)
        if quantized:
            x, scale = quantized_rows.quantize(x, launch)
    else:
        to = work.slots, work.items * config.tokens, launch
        if quantized:
            x, scale = quantized_rows.spread(x, *to)
        else:
            of_share = (work.num_items, config.tokens) if is_share else ()
            x = mosaic_route.spread(x, *to, *of_share)
    items = (work.experts, work.num_items, work.items)
    arranged = formats.kind(down.values, down.scale) == "mxfp4"
    inner = mosaic_gpu.gate_up(x, gate_up, *items, limit, config, launch, arranged, scale)
    if are_quantized(activations, down.values, down.scale):
        inner, inner_scale = quantized_rows.quantize(inner, launch)
    return mosaic_gpu.down(inner, down, *items, config, launch, arranged, inner_scale)


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
