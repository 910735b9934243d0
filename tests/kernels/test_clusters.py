"""Blocks of a cluster that load the rows of an item together: the bits of blocks that load them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.activations import quantize
from pallas_kernels.device import H200
from pallas_kernels.moe import mosaic_gpu
from pallas_kernels.moe.mosaic_gpu import TuningConfig
from pallas_kernels.moe.reference import ExpertWeights
from tests.kernels.test_groups_mosaic import launch, whole

TOKENS = 16
EXPERTS = jnp.array([2, 0, 3, 1], jnp.int32)
"""Of each item; the last item does not exist."""
WIDTH, INNER = 384, 256  # three and two steps, six and four weight tiles


def experts(form: str, parts: int, N: int, K: int) -> ExpertWeights:
    shape = (4, parts, N, K) if parts > 1 else (4, N, K)
    values = whole(shape, parts)
    if form == "bf16":
        return ExpertWeights(values.astype(jnp.bfloat16), None, None)
    blocks = (*shape[:-2], -(-N // formats.BLOCK), -(-K // formats.BLOCK))
    scale = jnp.exp(jax.random.normal(jax.random.key(5), blocks))
    return ExpertWeights(values.astype(jnp.float8_e4m3fn), scale, None)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.usefixtures("race_free")
@pytest.mark.parametrize(("form", "stages"), [("fp8", 3), ("bf16", 2), ("fp8 rows", 3)])
def test_experts_have_the_same_bits(form, stages):
    items = (EXPERTS, jnp.array([3], jnp.int32), len(EXPERTS))
    form, *quantised = form.split()

    def run(cluster: int) -> list[np.ndarray]:
        config = TuningConfig(TOKENS, False, (stages, stages), cluster)
        found = []
        for kernel, parts, N, K, options in (
            (mosaic_gpu.gate_up, 2, INNER, WIDTH, (None,)),
            (mosaic_gpu.down, 1, WIDTH, INNER, ()),
        ):
            x, scale = whole((len(EXPERTS) * TOKENS, K), 7), ()
            if quantised:
                x, *scale = quantize(x)
            else:
                x = x.astype(jnp.bfloat16)
            weight = experts(form, parts, N, K)
            made = kernel(x, weight, *items, *options, config, launch(H200), False, *scale)
            found.append(np.asarray(made)[: 3 * TOKENS])
        return found

    for alone, together in zip(run(1), run(2), strict=True):
        assert np.isfinite(alone.astype(np.float32)).all()
        assert np.array_equal(alone, together)


def test_clusters_that_do_not_divide_the_weight_tiles_are_refused():
    config = TuningConfig(TOKENS, False, (2, 2), 2)
    x = jnp.zeros((4 * TOKENS, 128), jnp.bfloat16)
    weight = experts("bf16", 2, 192, 128)
    with pytest.raises(NotImplementedError, match="do not divide 3 weight tiles"):
        mosaic_gpu.gate_up(x, weight, EXPERTS, EXPERTS, 4, None, config, launch(H200))
