"""Mixtures of experts: rows choose experts by a router, alone or with the residual sum and the norm
before it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, formats
from pallas_kernels.activations import row_dtype
from pallas_kernels.block_gemm.api import add_in_order, partial_products
from pallas_kernels.moe import paths, reference
from pallas_kernels.moe.paths import Call, Path, Routing
from pallas_kernels.moe.reference import Choice, Experts, Mixture
from pallas_kernels.moe.worklist import Worklist, make_worklist, own_items
from pallas_kernels.rms_norm.api import add_rms_norm
from pallas_kernels.rms_norm.api import check as check_norm


class Norm(NamedTuple):
    """An RMSNorm: its weight [D], and what it adds to the mean square."""

    scale: jax.Array
    eps: float


class Router(NamedTuple):
    """The weight and scale [E, D] of a linear layer, as in `linear`, and the choice by its
    results."""

    weight: jax.Array
    scale: jax.Array | None
    choice: Choice


def mixture(
    x: jax.Array,
    logits: jax.Array,
    choice: Choice,
    experts: Experts,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Mixture:
    """Routes rows and runs their experts; the consumer computes the weighted sum.

    Args:
      x: [R, D] in the dtype of the stream, or in `row_dtype` of the experts' gate_up.
      logits: float32 [R, E], without the router's bias.
    Returns:
      k parts per row, or one from the reference, which adds them already. A row's result does not
      depend on the other rows.
    Raises:
      ValueError: inconsistent shapes, or dtypes that match no format.
      NotImplementedError: the kernel is requested where none exists.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [R, E]: {logits.dtype=} {logits.shape=}")
    R, E = logits.shape
    if x.ndim != 2 or len(x) != R:
        raise ValueError(f"rows of activations [{R}, D] are needed: {x.shape=} {logits.shape=}")
    D = x.shape[1]
    _check(D, E, choice, experts)
    call = Call(R, D, E, choice.top_k, x.dtype, is_share=experts.first is not None)
    return _mixed(x, logits, choice, experts, paths.resolve(call, experts, implementation))


def normed_mixture(
    h: jax.Array,
    parts: jax.Array,
    bias: jax.Array | None,
    norm: Norm,
    router: Router,
    experts: Experts,
    *,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, Mixture]:
    """Adds `parts` and a bias to the residual stream h, norms it, routes the rows and runs their
    experts.

    The results are those of `add_rms_norm`, `partial_products` and `mixture`. One kernel may do
    what several of them do (`paths`), with the same bits.

    Args:
      h: [..., D].
      parts: [parts, ..., D], as in `add_rms_norm`.
      bias: [D] or None, added with the parts.
    Returns:
      (the stream [..., D] after the sum; the mixture of its rows).
    Raises:
      ValueError: as the three functions.
    """
    D = h.shape[-1]
    R, E = h.size // D, formats.logical_shape(router.weight, router.scale)[0]
    _check(D, E, router.choice, experts)
    # The norm stores rows for the router, and for the experts if they read another dtype.
    own = row_dtype(experts.gate_up.values, experts.gate_up.scale, h.dtype)
    dtypes = (own,) if own == h.dtype else (jnp.dtype(h.dtype), own)
    is_share = experts.first is not None
    call = Call(R, D, E, router.choice.top_k, own, h.dtype, router.weight.dtype, is_share)
    path = paths.resolve(call, experts, implementation)
    if path.name in ("norm_route", "norm_product"):
        stream, mixed = _by_few_kernels(h, parts, bias, norm, router, experts, dtypes, path)
        return stream.reshape(h.shape), mixed
    stream, *rows = add_rms_norm(
        h,
        parts,
        norm.scale,
        eps=norm.eps,
        bias=bias,
        out_dtypes=dtypes,
        implementation=implementation,
    )
    logits = add_in_order(
        partial_products(
            rows[0].reshape(R, D),
            router.weight,
            scale=router.scale,
            activations=experts.activations,
            implementation=implementation,
        )
    )
    return stream, _mixed(rows[-1].reshape(R, D), logits, router.choice, experts, path)


def _by_few_kernels(
    h, parts, bias, norm: Norm, router: Router, experts: Experts, dtypes: tuple, path: Path
) -> tuple[jax.Array, Mixture]:
    """`normed_mixture` on the paths whose norm and router are one kernel; the stream is [R, D]."""
    from pallas_kernels.moe import mosaic_norm  # a slow import that CPU use does not need

    check_norm(h, parts, norm.scale, bias=bias)
    D = h.shape[-1]
    rows, parts, choice = h.reshape(-1, D), parts.reshape(len(parts), -1, D), router.choice
    if path.name == "norm_product":
        stream, *rows, logits = mosaic_norm.norm_and_product(
            rows,
            parts,
            bias,
            norm.scale,
            router.weight,
            eps=norm.eps,
            launch=path.launch,
            out_dtypes=dtypes,
        )
        return stream, _mixed(rows[-1], logits, choice, experts, path)
    routing = Routing.of(len(rows), len(router.weight), choice, path.config, path.launch)
    stream, *rows, weights, slots, of_items, num_items = mosaic_norm.norm_and_route(
        rows,
        parts,
        bias,
        norm.scale,
        router.weight,
        choice.bias,
        routing,
        eps=norm.eps,
        out_dtypes=dtypes,
    )
    work = Worklist(of_items, num_items, slots, routing.items)
    return stream, _sorted_mixture(rows[-1], weights, work, experts, path)


def _mixed(
    x: jax.Array, logits: jax.Array, choice: Choice, experts: Experts, path: Path
) -> Mixture:
    """`mixture` on any path, without the norm."""
    if path.config is not None:
        weights, work = _routed(logits, choice, experts, path)
        return _sorted_mixture(x, weights, work, experts, path)
    if path.launch is None:
        return reference.mixture(x, logits, choice, experts)
    from pallas_kernels.moe import mosaic_tpu  # a slow import that other platforms do not need

    return mosaic_tpu.mixture(x, logits, choice, experts, path.launch)


def _routed(
    logits: jax.Array, choice: Choice, experts: Experts, path: Path
) -> tuple[jax.Array, Worklist]:
    """Weights [k, R'] and the worklist of the rows of `logits`, by kernels; R' >= R."""
    from pallas_kernels.moe import mosaic_plan, mosaic_route

    R, E = logits.shape
    routing = Routing.of(R, E, choice, path.config, path.launch)
    first, count = experts.first, len(experts.gate_up.values)
    if path.name in ("norm_product", "plan"):
        weights, slots, of_items, num_items = mosaic_plan.route_and_plan(
            logits, choice.bias, routing, first, None if first is None else count
        )
        return weights, Worklist(of_items, num_items, slots, routing.items)
    if path.name == "place":
        weights, slots, of_items, num_items = mosaic_route.route_and_place(
            logits, choice.bias, routing
        )
        work = Worklist(of_items, num_items, slots, routing.items)
    else:
        weights, ids, *_ = mosaic_route.route(
            logits, choice.bias, choice.top_k, choice.normalize, path.launch
        )
        weights = weights[:, :R]
        work = make_worklist(ids[:, :R], E, routing.tokens, routing.shared)
    if first is not None:
        work, weights = own_items(work, weights, first, count, routing.tokens)
    return weights, work


def _sorted_mixture(
    x: jax.Array, weights: jax.Array, work: Worklist, experts: Experts, path: Path
) -> Mixture:
    """The mixture of rows x [R, D] by the kernels of a GPU."""
    from pallas_kernels.moe import mosaic_gpu  # a slow import that CPU use does not need

    values = mosaic_gpu.results(x, work, experts, path.config, path.launch)
    return Mixture(values, weights, work.slots)


def _check(D: int, E: int, choice: Choice, experts: Experts) -> None:
    """Raises ValueError unless rows of D columns and logits of E experts fit the weights."""
    if not 1 <= choice.top_k <= E:
        raise ValueError(f"{choice.top_k=} must lie between 1 and the number of experts, {E}")
    gate_up, down = experts.gate_up, experts.down
    shape = formats.logical_shape(gate_up.values, gate_up.scale)
    if len(shape) != 4 or shape[1] != 2 or shape[3] != D:
        raise ValueError(f"gate_up is {[*shape]} and must be [E, 2, F, {D}], as rows have {D}")
    own, _, F, _ = shape
    if own > E or (experts.first is None and own != E):
        raise ValueError(f"there are logits of {E} experts, and weights of {own}")
    shape = formats.logical_shape(down.values, down.scale)
    if shape != (own, D, F):
        raise ValueError(
            f"down is {[*shape]} and must be {[own, D, F]}, as gate_up is {[own, 2, F, D]}"
        )
    wanted = ("gate_up", gate_up.bias, (own, 2, F)), ("down", down.bias, (own, D))
    for name, bias, shape in wanted:
        if bias is not None and bias.shape != shape:
            raise ValueError(f"{name}'s bias is {[*bias.shape]} and must be {[*shape]}")
