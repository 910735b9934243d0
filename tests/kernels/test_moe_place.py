"""The worklist of more rows than a cluster of blocks has, in Mosaic's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import mosaic_route
from pallas_kernels.moe.paths import Routing, TuningConfig
from pallas_kernels.moe.reference import Choice
from tests.kernels.compiled import make_worklist, routed
from tests.kernels.experts import launch, logits_of

pytestmark = pytest.mark.sampled(1, slow=3)


def assert_placed(logits, bias, k: int, tokens: int, *, normalize: bool = True) -> None:
    """All results of `route_and_place`, beside the worklist in jnp and the kernel `route`."""
    R, E = logits.shape
    config = TuningConfig(tokens, False, (2, 2))
    routing = Routing.of(R, E, Choice(k, normalize), config, launch())
    weights, slots, experts, num_items = map(
        np.asarray, mosaic_route.route_and_place(logits, bias, routing)
    )
    biased = logits if bias is None else logits + bias.astype(jnp.float32)
    _, ids = routed(biased, k, normalize)
    work = make_worklist(ids.T, E, tokens, False)
    count = int(work.num_items[0])
    assert (num_items == count).all()
    assert np.array_equal(experts[:count], work.experts[:count])
    assert np.array_equal(slots[:, :R], work.slots)
    alone, *_ = mosaic_route.route(logits, bias, k, normalize, launch())
    assert np.array_equal(weights[:, :R], alone[:, :R])


@pytest.mark.usefixtures("race_free", "chip")
@pytest.mark.parametrize(
    ("R", "E", "k", "tokens", "normalize", "bias", "ties"),
    [
        (257, 128, 8, 32, True, False, True),  # the last of five blocks has one row
        (130, 64, 4, 16, False, True, False),  # fewer experts than threads
        (320, 96, 3, 64, True, True, False),  # padded experts, and logits straight to registers
        (70, 32, 4, 8, True, False, True),
        (70, 32, 4, 24, True, False, True),  # items of rows that are no power of two
    ],
)
def test_the_kernels_make_the_worklist(R, E, k, tokens, normalize, bias, ties):
    biases = jax.random.normal(jax.random.key(1), (E,)).astype(jnp.bfloat16) if bias else None
    assert_placed(logits_of(R, E, ties=ties), biases, k, tokens, normalize=normalize)


@pytest.mark.usefixtures("race_free")
def test_all_rows_may_go_to_the_same_experts_and_some_logits_may_be_masked():
    """Experts 3 and 31 get all rows; of the last row all experts but one are masked."""
    logits = jnp.zeros((140, 32)).at[:, jnp.array([3, 31])].set(jnp.array([1.0, 2.0]))
    assert_placed(logits.at[139].set(-jnp.inf).at[139, 7].set(0.0), None, 2, 16)


@pytest.mark.usefixtures("race_free")
def test_slots_may_have_more_than_15_bits():
    """128 experts with an item of 512 rows each."""
    assert_placed(logits_of(70, 128), None, 8, 512)
