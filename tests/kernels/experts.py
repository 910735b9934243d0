"""Calls of mixtures of experts as tests write them: one argument for each part."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.moe import api, paths, reference
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights, Mixture
from pallas_kernels.moe.worklist import make_worklist
from tests.kernels.compiled import dequantize


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


def launch() -> dispatch.Launch:
    return dispatch.resolve("moe", "mosaic_gpu")


@cache
def logits_of(R: int, E: int, *, ties: bool = False) -> jax.Array:
    """float32 [R, E]; with ties few whole numbers, so that most rows have some."""
    logits = 2 * np.asarray(jax.random.normal(jax.random.key(R + E), (R, E)))
    return jnp.asarray(np.round(logits) if ties else logits)


def by_hand(x, ids, weights, gate_up, down, limit, inner_dtype=np.float64) -> np.ndarray:
    """The mixture row by row in float64, but for the dtype of the inner activations."""
    unpacked = lambda p: np.asarray(dequantize(p.values, p.scale, jnp.float32), np.float64)
    wide = [unpacked(p) for p in (gate_up, down)]
    bias = [0 if p.bias is None else np.asarray(p.bias, np.float64) for p in (gate_up, down)]
    bias = [np.broadcast_to(b, w.shape[:-1]) for b, w in zip(bias, wide, strict=True)]
    out = np.zeros(x.shape)
    for r, row in enumerate(np.asarray(x, np.float64)):
        for e, share in zip(np.asarray(ids)[r], np.asarray(weights, np.float64)[r], strict=True):
            gate, up = wide[0][e] @ row + bias[0][e]
            if limit is None:
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            inner = inner.astype(inner_dtype).astype(np.float64)
            out[r] += share * (wide[1][e] @ inner + bias[1][e])
    return out
