"""The worklist of a device that has some of the experts, in Mosaic's interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import mosaic_plan, reference
from pallas_kernels.moe.paths import Routing, TuningConfig
from pallas_kernels.moe.worklist import make_worklist, own_items
from tests.kernels.experts import launch, logits_of

pytestmark = pytest.mark.usefixtures("race_free")


@partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def by_definition(logits, bias, weights, first, k, count, normalize, tokens, shared):
    """Weights of the reference and of `own_items`, which takes `weights`; then the worklist."""
    E = logits.shape[1]
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    found, ids = reference.route(logits, k, normalize)
    work = make_worklist(ids.T, E, tokens, shared)
    own, weights = own_items(work, weights, first, count, tokens)
    _, found = own_items(work, found.T, first, count, tokens)
    return found, weights, own.slots, own.experts, own.num_items


def assert_own(logits, bias, k: int, first: int, count: int, *, normalize: bool = True) -> int:
    """The results are those of `own_items(make_worklist())`; returns the number of items."""
    R, E = logits.shape
    config = TuningConfig.choose(R, E, k, hopper=False, quantized=False)
    routing = Routing.of(R, E, reference.Choice(k, normalize), config, launch())
    run = partial(mosaic_plan.route_and_plan, logits, bias, routing)
    of_all = run()[0][:, :R]
    at = jnp.int32(first)
    weights, slots, experts, num_items = map(np.asarray, run(at, count))
    wanted = by_definition(
        logits, bias, of_all, at, k, count, normalize, config.tokens, config.shared
    )
    total = int(wanted[4][0])
    np.testing.assert_allclose(weights[:, :R], wanted[0], rtol=1e-6)
    assert np.array_equal(weights[:, :R], wanted[1])
    assert np.array_equal(slots[:, :R], wanted[2])
    assert np.array_equal(experts[:total], wanted[3][:total])
    assert (num_items == total).all()
    assert ((experts >= 0) & (experts < count)).all()
    return total


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize(
    ("R", "E", "k", "normalize", "bias", "kind"),
    [
        (16, 32, 4, True, False, "ties"),  # items share the rows
        (8, 128, 8, False, True, "plain"),
        (1, 32, 4, True, True, "plain"),
        (256, 128, 8, True, False, "uneven"),
        (70, 96, 4, True, True, "plain"),
        (24, 128, 8, True, True, "ties"),
        (64, 32, 4, False, False, "uneven"),
        (24, 32, 4, False, False, "plain"),
        (64, 128, 8, True, False, "uneven"),
    ],
)
@pytest.mark.parametrize(("share", "of"), [(0, 2), (1, 2), (0, 4), (3, 4)])
def test_the_plan_of_a_share_is_the_worklist_of_its_items(
    R, E, k, normalize, bias, kind, share, of
):
    biases = jax.random.normal(jax.random.key(1), (E,)).astype(jnp.bfloat16) if bias else None
    first, count = share * E // of, E // of
    logits = logits_of(R, E, ties=kind == "ties")
    if kind == "uneven":  # most rows choose the same experts, in all shares
        logits = logits.at[1:, :: E // 8].add(20)
    assert_own(logits, biases, k, first, count, normalize=normalize)
