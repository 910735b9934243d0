"""Items of any multiple of 8 rows, in Mosaic's interpreter: they change no bit of a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import GROUP
from pallas_kernels.moe import mosaic_gpu
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.quantize import mosaic_gpu as copies
from tests.kernels.compiled import make_worklist
from tests.kernels.test_moe_mosaic import LIMIT, experts, in_slots, launch, rows

R, E, TOP_K = 90, 4, 2


def mxfp4(shape: tuple[int, ...], seed: int) -> ExpertWeights:
    """Random codes, with scales of about 1 / 16."""
    rng = np.random.default_rng(seed)
    *outer, K = shape
    values = rng.integers(0, 256, (*outer, K // 2), np.uint8)
    scale = rng.integers(121, 125, (*outer, K // GROUP), np.uint8)
    return ExpertWeights(jnp.asarray(values), jnp.asarray(scale), None)


@pytest.mark.sampled(1, slow=1)
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


@pytest.mark.parametrize(
    ("R", "E", "k", "tokens"),
    [
        (128, 128, 8, 16),
        (256, 128, 8, 24),
        (512, 128, 8, 48),
        (1024, 128, 8, 80),
        (4096, 128, 8, 72),  # 256 rows an expert: four items
        (256, 32, 4, 48),
    ],
)
def test_items_hold_the_rows_of_most_experts(R, E, k, tokens):
    choose = mosaic_gpu.TuningConfig.choose
    assert choose(R, E, k, hopper=True, quantized=False).tokens == tokens
    assert choose(R, E, k, hopper=False, quantized=False).tokens in (8, 16, 32, 64)


@pytest.mark.usefixtures("race_free")
def test_rows_are_spread_to_their_slots():
    R, k, D, size = 5, 3, 128, 40
    x = jax.random.normal(jax.random.key(0), (R, D), jnp.bfloat16)
    slots = jax.random.permutation(jax.random.key(1), size)[: R * k].reshape(k, R).astype(jnp.int32)
    found = copies.spread(x, slots, size, launch())
    assert found.shape == (size, D)
    for j in range(k):
        assert np.array_equal(found[slots[j]], x)
    some = copies.spread(x, slots, size, launch(), jnp.array([3, 3], jnp.int32), 8)
    for j in range(k):
        copied = np.array([np.array_equal(*pair) for pair in zip(some[slots[j]], x, strict=True)])
        assert np.array_equal(copied, slots[j] < 24), "slots behind the items are left out"
