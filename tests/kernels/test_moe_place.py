"""The worklist of more rows than a cluster of blocks has, in Mosaic's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.device import B200, H200, RTX5090
from pallas_kernels.moe import mosaic_place, mosaic_plan, mosaic_route
from pallas_kernels.moe.api import CHIPS, ExpertWeights, mixture
from pallas_kernels.moe.worklist import most_items
from tests.kernels.compiled import make_worklist, routed

pytestmark = pytest.mark.sampled(1, slow=3)


def logits_of(R: int, E: int, *, ties: bool = False) -> jax.Array:
    """float32 [R, E]; with ties few whole numbers, so that most rows have some."""
    logits = 2 * jax.random.normal(jax.random.key(R + E), (R, E))
    return jnp.round(logits) if ties else logits


def launch() -> dispatch.Launch:
    return dispatch.resolve("moe", "mosaic_gpu", chips=CHIPS)


def assert_placed(logits, bias, k: int, tokens: int, *, normalize: bool = True) -> None:
    """All results of `route_and_place`, beside the worklist in jnp and the kernel `route`."""
    R, E = logits.shape
    items = most_items(R, E, k, tokens, False)
    weights, slots, experts, num_items = map(
        np.asarray,
        mosaic_place.route_and_place(
            logits, bias, top_k=k, normalize=normalize, tokens=tokens, items=items, launch=launch()
        ),
    )
    biased = logits if bias is None else logits + bias.astype(jnp.float32)
    _, ids = routed(biased, k, normalize)
    work = make_worklist(ids.T, E, tokens, False)
    count = int(work.num_items[0])
    assert (num_items == count).all()
    assert np.array_equal(experts[:count], work.experts[:count])
    assert np.array_equal(slots[:, :R], work.slots)
    alone, _ = mosaic_route.route(logits, bias, k, normalize, launch())
    assert np.array_equal(weights[:, :R], alone[:, :R])


@pytest.mark.usefixtures("race_free", "wgmma_or_tcgen05")
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
    """Experts 3 and 31 get all rows, and as many slots; of the last row all experts but one are masked."""
    logits = jnp.zeros((140, 32)).at[:, jnp.array([3, 31])].set(jnp.array([1.0, 2.0]))
    assert_placed(logits.at[139].set(-jnp.inf).at[139, 7].set(0.0), None, 2, 16)


@pytest.mark.usefixtures("race_free")
def test_slots_may_have_more_than_15_bits():
    """128 experts with an item of 512 rows each."""
    assert_placed(logits_of(70, 128), None, 8, 512)


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(None, marks=pytest.mark.exhaustive), 4])
def test_a_mixture_is_the_same_with_either_worklist(monkeypatch, first):
    """Also on a device that has only the experts from `first` on."""
    R, E, D, F, own = 70, 16, 128, 64, 16 if first is None else 8
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)
    weights = (
        ExpertWeights(draw(0, own, 2, F, D), None, None),
        ExpertWeights(draw(1, own, D, F), None, None),
    )
    x, logits = draw(2, R, D), logits_of(R, E)
    at = None if first is None else jnp.int32(first)
    run = lambda: mixture(
        x, logits, *weights, router_bias=None, top_k=2, normalize=True, first=at,
        implementation="mosaic_gpu",
    ).added(R)  # fmt: skip
    monkeypatch.setattr(mosaic_plan, "MOST_ROWS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(mosaic_place, "fits", lambda *_: False)
        wanted = run()
    calls = []
    place = mosaic_place.route_and_place
    monkeypatch.setattr(
        mosaic_place, "route_and_place", lambda *args, **how: calls.append(1) or place(*args, **how)
    )
    assert np.array_equal(run(), wanted)
    assert calls == [1]


@pytest.mark.parametrize(
    ("R", "E", "device", "fits"),
    [
        (16384, 128, H200, True),
        (16384, 128, B200, True),
        (16385, 128, H200, False),
        (8192, 128, RTX5090, True),
        (16384, 128, RTX5090, False),
        (300, 512, H200, False),
    ],
)
def test_what_exceeds_the_kernels_is_refused(R, E, device, fits):
    assert mosaic_place.fits(R, E, device) == fits
    if not fits:
        with pytest.raises(ValueError, match="exceeds the limits"):
            mosaic_place.route_and_place(
                jax.ShapeDtypeStruct((R, E), jnp.float32), None, top_k=8, normalize=True, tokens=64,
                items=8, launch=dispatch.Launch(device),
            )  # fmt: skip
