"""Experts that several devices share: each computes the rows of its own experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.reference import ExpertWeights
from peagle_jax.models.quant import quantize_fp8
from tests.kernels.experts import mixture

E, K, D, F = 8, 2, 128, 192


def projection(form: str, shape: tuple[int, ...], seed: int) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    if form == "mxfp4":
        values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
        scale = rng.integers(120, 124, (*shape[:-1], shape[-1] // 32), np.uint8)
        return ExpertWeights(jnp.asarray(values), jnp.asarray(scale))
    weight = (rng.normal(size=shape) / 8).astype(np.float32)
    if form == "fp8":
        return ExpertWeights(*map(jnp.asarray, quantize_fp8(weight)))
    return ExpertWeights(jnp.asarray(weight, jnp.bfloat16))


@pytest.mark.parametrize(
    ("form", "rows", "implementation"),
    [
        ("fp8", 11, "reference"),
        ("mxfp4", 11, "reference"),
        *[
            pytest.param(form, rows, "mosaic_gpu", marks=pytest.mark.exhaustive)
            for form in ("bf16", "fp8", "mxfp4")
            for rows in (5, 70)
            if (form, rows) != ("fp8", 70)
        ],
        pytest.param("fp8", 70, "mosaic_gpu", marks=pytest.mark.slow),
    ],
)
def test_the_shares_of_all_devices_add_to_the_mixture(form, rows, implementation):
    inner = 256 if form == "mxfp4" else F
    weights = projection(form, (E, 2, inner, D), 0), projection(form, (E, D, inner), 1)
    x = jax.random.normal(jax.random.key(2), (rows, D)).astype(jnp.bfloat16)
    logits = 2 * jax.random.normal(jax.random.key(3), (rows, E))
    rules = dict(top_k=K, normalize=True)
    whole = mixture(x, logits, *weights, **rules, implementation="reference").added(rows)

    # Jitted: jax queues 32 programs of a CPU device. If those that wait for an interpreted kernel
    # fill the queue, the programs of the interpreter itself cannot enter it, and nothing ever ends.
    @jax.jit
    def compute_share(first, *own):
        found = mixture(x, logits, *own, **rules, first=first, implementation=implementation)
        return found.added(rows)

    total = np.zeros((rows, D), np.float32)
    for rank in range(2):
        first = rank * E // 2
        own = jax.tree.map(lambda leaf: leaf[first : first + E // 2], weights)  # noqa: B023
        share = np.asarray(compute_share(jnp.int32(first), *own), np.float32)
        assert np.isfinite(share).all()
        total += share
    np.testing.assert_allclose(total, whole.astype(jnp.float32), rtol=0.03, atol=0.03)
