"""Limits of the kernel that routes and plans a small batch, and what happens beyond them."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.moe import mosaic_plan
from pallas_kernels.moe.api import CHIPS, ExpertWeights, mixture


@pytest.mark.parametrize(
    ("R", "E", "k", "fits"),
    [(256, 128, 64, True), (256, 128, 65, False), (257, 8, 1, False), (8, 129, 1, False)],
)
def test_what_exceeds_the_planning_kernel_is_refused(R, E, k, fits):
    assert mosaic_plan.fits(R, E, k) == fits
    if fits:
        return
    launch = dispatch.resolve("moe", "mosaic_gpu", chips=CHIPS)
    with pytest.raises(ValueError, match="exceed the limits"):
        mosaic_plan.route_and_plan(
            jnp.zeros((R, E)), None, top_k=k, normalize=True, tokens=64, shared=False, items=8,
            launch=launch,
        )  # fmt: skip


def test_a_mixture_beyond_the_limits_is_routed_and_sorted_by_other_kernels():
    """Each of 256 rows has 100 experts."""
    R, E, F, D, k = 256, 128, 64, 64, 100
    made = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights = (
        ExpertWeights(made(E, 2, F, D), None, None),
        ExpertWeights(made(E, D, F), None, None),
    )
    run = lambda x, logits, *weights: mixture(
        x, logits, *weights, router_bias=None, top_k=k, normalize=True, implementation="mosaic_gpu"
    )
    mixed = jax.eval_shape(run, made(R, D), jax.ShapeDtypeStruct((R, E), jnp.float32), *weights)
    assert (mixed.weights.shape, mixed.rows.shape) == ((k, R), (k, R))
