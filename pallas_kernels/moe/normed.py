"""A mixture of experts with the residual sum and the norm before it, and its router."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.activations import row_dtype
from pallas_kernels.block_gemm.api import add_in_order, partial_products
from pallas_kernels.dispatch import Implementation, Launch
from pallas_kernels.moe.api import (
    DEFAULT_FORM,
    ExpertForm,
    Mixture,
    config_for,
    mixture,
    resolve,
    run_experts,
)
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.moe.worklist import Worklist, most_items
from pallas_kernels.rms_norm.api import add_rms_norm, check


class Norm(NamedTuple):
    """An RMSNorm: its weight [D], and what it adds to the mean square."""

    scale: jax.Array
    eps: float


class Router(NamedTuple):
    """The choice of experts.

    Attributes:
      weight, scale: [E, D], as in `linear`.
      bias: [E] or None.
      top_k, normalize: as in `api.route`.
    """

    weight: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None
    top_k: int
    normalize: bool


class Experts(NamedTuple):
    """The experts; the attributes are those of `api.mixture`."""

    gate_up: ExpertWeights
    down: ExpertWeights
    form: ExpertForm = DEFAULT_FORM
    first: jax.Array | None = None


def normed_mixture(
    h: jax.Array,
    parts: jax.Array,
    bias: jax.Array | None,
    norm: Norm,
    router: Router,
    experts: Experts,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Mixture]:
    """Adds `parts` and a bias to the residual stream h, norms it, routes the rows and runs their
    experts.

    The results are those of `add_rms_norm`, `partial_products` and `mixture`. On Hopper one kernel
    does for few rows what otherwise a norm and a product do (`mosaic_norm_product`), or these and a
    plan (`mosaic_norm_route`), with the same bits.

    Args:
      h: [..., D].
      parts: [S, ..., D], as in `add_rms_norm`.
      bias: [D] or None, added with the parts.
    Returns:
      (the stream [..., D] after the sum; the mixture of its rows).
    Raises:
      ValueError: as the three functions.
    """
    D = h.shape[-1]
    gate_up, down, form, first = experts
    how = dict(top_k=router.top_k, normalize=router.normalize)
    dtypes = row_dtypes(h.dtype, gate_up)
    E, R = formats.logical_shape(router.weight, router.scale)[0], h.size // D
    rows = jax.ShapeDtypeStruct((R, D), dtypes[-1])
    launch = resolve(rows, gate_up, down, form.activations, implementation, E)
    fused = None
    if launch is not None and launch.device.platform == "cuda":
        fused = _fused(h, router, experts, launch)
    if fused is not None:
        check(h, parts, norm.scale, bias=bias)
        given = h.reshape(R, D), parts.reshape(-1, R, D), bias, norm.scale, router.weight
        made = dict(eps=norm.eps, launch=launch, out_dtypes=dtypes)
    if fused == "plan":
        added, mixed = _planned(given, made, router, experts)
        return added.reshape(h.shape), mixed
    to_experts = dict(router_bias=router.bias, form=form, first=first)
    if fused == "product":
        from pallas_kernels.moe import mosaic_norm_product

        added, *rows, logits = mosaic_norm_product.norm_and_product(*given, **made)
        added = added.reshape(h.shape)
    else:
        given = dict(eps=norm.eps, bias=bias, out_dtypes=dtypes, implementation=implementation)
        added, *rows = add_rms_norm(h, parts, norm.scale, **given)
        rows = [x.reshape(R, D) for x in rows]
        given = dict(scale=router.scale, activations=form.activations)
        to = rows[0], router.weight
        logits = add_in_order(partial_products(*to, **given, implementation=implementation))
    to_experts |= how | dict(implementation=implementation)
    return added, mixture(rows[-1], logits, gate_up, down, **to_experts)


def _fused(
    h: jax.Array, router: Router, experts: Experts, launch: Launch
) -> Literal["plan", "product"] | None:
    """What one kernel does after the norm: the router's product, or also the plan of all
    experts."""
    # Slow imports that CPU use does not need.
    from pallas_kernels.moe import mosaic_norm_product, mosaic_norm_route

    if router.weight.dtype != jnp.bfloat16:
        return None
    D = h.shape[-1]
    few = h.size // D, len(router.weight), D, h.dtype
    if experts.first is None and mosaic_norm_route.fits(*few, router.top_k, launch.device):
        return "plan"
    return "product" if mosaic_norm_product.fits(*few, launch.device) else None


def _planned(
    given: tuple, made: dict[str, Any], router: Router, experts: Experts
) -> tuple[jax.Array, Mixture]:
    """(the stream [R, D] after the sum; the mixture) with one kernel before the experts.

    `given` and `made` are the arguments of `mosaic_norm_product.norm_and_product`.
    """
    from pallas_kernels.moe import mosaic_norm_route

    gate_up, down, form, _ = experts
    launch = made["launch"]
    sizes = len(given[0]), len(router.weight), router.top_k
    config = config_for(*sizes, (gate_up, down), form.activations, launch)
    cut = dict(tokens=config.tokens, shared=config.shared)
    items = most_items(*sizes, **cut)
    choice = dict(top_k=router.top_k, normalize=router.normalize, items=items)
    added, *rows, weights, slots, of_items, num_items = mosaic_norm_route.norm_and_route(
        *given, router.bias, **made, **choice, **cut
    )
    work = Worklist(of_items, num_items, slots, items)
    to = gate_up, down, form.limit, config, launch, form.activations
    return added, Mixture(run_experts(rows[-1], work, *to), weights, slots)


def row_dtypes(dtype: jnp.dtype, gate_up: ExpertWeights) -> tuple[jnp.dtype, ...]:
    """Dtypes in which the norm stores rows of a stream of `dtype`: that of the router, and the
    experts' if it is another."""
    own = row_dtype(gate_up.values, gate_up.scale, dtype)
    return (own,) if own == dtype else (jnp.dtype(dtype), own)
