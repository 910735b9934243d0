"""Items of any multiple of 8 rows, in Mosaic's interpreter: they change no bit of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import GROUP
from pallas_kernels.moe import mosaic_gpu
from pallas_kernels.moe.reference import ExpertWeights
from tests.kernels.compiled import make_worklist
from tests.kernels.experts import launch
from tests.kernels.test_moe_mosaic import LIMIT, experts, in_slots, rows

R, E, TOP_K = 90, 4, 2


def mxfp4(shape: tuple[int, ...], seed: int) -> ExpertWeights:
    """Random codes, with scales of about 1 / 16."""
    rng = np.random.default_rng(seed)
    *outer, K = shape
    values = rng.integers(0, 256, (*outer, K // 2), np.uint8)
    scale = rng.integers(121, 125, (*outer, K // GROUP), np.uint8)
    return ExpertWeights(jnp.asarray(values), jnp.asarray(scale), None)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.usefixtures("race_free", "chip")
@pytest.mark.parametrize("tokens", [24, 48, 72, 80])
@pytest.mark.parametrize("form", ["fp8", "mxfp4", "bf16", "fp8_rows"])
def test_rows_of_an_item_do_not_change_a_bit(form, tokens):
    """Beside items of 8 rows."""
    arranged = form == "mxfp4"
    D = 256 if arranged else 128
    if arranged:
        gate_up, down = mxfp4((E, 2, 256, D), 0), mxfp4((E, D, 256), 1)
    else:
        gate_up, down = experts(form, E=E)
    ids = jax.random.permutation(jax.random.key(2), jnp.arange(R * TOP_K) % E).reshape(R, TOP_K)

    def run(tokens):
        config = mosaic_gpu.TuningConfig(tokens, False, (2, 2))
        work = make_worklist(ids.T.astype(jnp.int32), E, tokens, False)
        items = (work.experts, work.num_items, work.items)
        source = in_slots(rows(R, D), work.slots, work.items * tokens)
        inner = mosaic_gpu.gate_up(source, gate_up, *items, LIMIT, config, launch(), arranged)
        made = mosaic_gpu.down(inner, down, *items, config, launch(), arranged)
        return np.asarray(made)[np.asarray(work.slots.T)]

    found = run(tokens)
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0
    assert np.array_equal(found, run(8))
