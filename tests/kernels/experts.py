"""Calls of mixtures of experts as tests write them: one argument for each part."""

import jax
import jax.numpy as jnp

from pallas_kernels.moe import api, paths, reference
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights, Mixture
from pallas_kernels.moe.worklist import make_worklist


def mixture(
    x, logits, gate_up, down, *, top_k, normalize, router_bias=None, implementation=None, **options
) -> Mixture:
    """`api.mixture`; `options` are fields of `Experts`."""
    choice = Choice(top_k, normalize, router_bias)
    experts = Experts(gate_up, down, **options)
    return api.mixture(x, logits, choice, experts, implementation=implementation)


def moe(
    x, ids, weights, gate_up: ExpertWeights, down: ExpertWeights, *, implementation=None, **options
) -> jax.Array:
    """Each row's weighted sum over its experts ids [R, k], which nothing chooses: [R, D]."""
    experts = Experts(gate_up, down, **options)
    (R, D), E = x.shape, len(gate_up.values)
    call = paths.Call(R, D, E, ids.shape[1], x.dtype)
    path = paths.resolve(call, experts, implementation)
    if path.name == "reference":
        return reference.moe(x, ids, weights, gate_up, down, experts.limit, experts.activations)
    if path.name == "tpu":
        from pallas_kernels.moe import mosaic_tpu

        values, slots = mosaic_tpu.results(x, ids, experts, path.launch)
        return Mixture(values, weights.T, slots).added(R).astype(x.dtype)
    from pallas_kernels.moe import mosaic_gpu

    work = make_worklist(ids.T, E, path.config.tokens, path.config.shared)
    values = mosaic_gpu.results(x, work, experts, path.config, path.launch)
    return Mixture(values, weights.T, work.slots).added(R)


def without(monkeypatch, *names: str) -> None:
    """Calls take no path of these names."""
    left = {name: takes for name, takes in paths.PATHS.items() if name not in names}
    monkeypatch.setattr(paths, "PATHS", left)


def route(logits: jax.Array, top_k: int, *, normalize: bool) -> tuple[jax.Array, jax.Array]:
    return reference.route(jnp.asarray(logits), top_k, normalize)
