"""Which path a mixture of experts takes, and what happens beyond the limits of each."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import B200, H200
from pallas_kernels.moe import paths
from pallas_kernels.moe.paths import Call
from pallas_kernels.moe.reference import Experts, ExpertWeights
from tests.kernels.experts import mixture

HALF, WIDE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
made = lambda *shape: jax.ShapeDtypeStruct(shape, HALF)


def path_of(device, R: int, E: int, top_k: int, **options) -> str:
    D = options.pop("D", 2048)
    experts = Experts(ExpertWeights(made(E, 2, 768, D)), ExpertWeights(made(E, D, 768)))
    with dispatch.assume(device):
        return paths.resolve(Call(R, D, E, top_k, HALF, **options), experts).name


@pytest.mark.parametrize(
    ("R", "options", "device", "path"),
    [
        (16, dict(), H200, "norm_route"),
        (16, dict(D=1024), H200, "norm_route"),
        (16, dict(is_share=True), H200, "norm_product"),
        (17, dict(), H200, "norm_product"),
        (128, dict(), H200, "norm_product"),
        (129, dict(), H200, "plan"),
        (8, dict(E=64), H200, "plan"),
        (8, dict(D=2880), H200, "plan"),
        (16, dict(D=4096), H200, "plan"),
        (8, dict(router_dtype=WIDE), H200, "plan"),
        (8, dict(stream_dtype=WIDE), H200, "plan"),
        (8, dict(), B200, "plan"),
    ],
)
def test_norm_and_router_are_one_kernel_for_few_rows_on_hopper(R, options, device, path):
    call = dict(E=128, top_k=8, stream_dtype=HALF, router_dtype=HALF) | options
    assert path_of(device, R, **call) == path


def test_a_mixture_beyond_the_limits_is_routed_and_sorted_by_other_kernels():
    """Each of 256 rows has 100 experts."""
    R, E, F, D, k = 256, 128, 64, 64, 100
    weights = ExpertWeights(made(E, 2, F, D)), ExpertWeights(made(E, D, F))
    run = lambda x, logits, *weights: mixture(
        x, logits, *weights, top_k=k, normalize=True, implementation="mosaic_gpu"
    )
    mixed = jax.eval_shape(run, made(R, D), jax.ShapeDtypeStruct((R, E), jnp.float32), *weights)
    assert (mixed.weights.shape[0], mixed.rows.shape[0]) == (k, k)
