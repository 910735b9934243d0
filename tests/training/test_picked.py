"""Some anchors of each text: rows and gradients are those of all, with weight on these only."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.training import passes
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.picked import narrowed, pick, widened
from peagle_jax.training.texts import Blocks
from peagle_jax.training.trainer import split_model
from tests import tiny
from tests.training.small import S, head_options, run_target, three_texts

BLOCKS = Blocks((3, 2, 2, 1))
VALID = jnp.arange(S) >= jnp.array([[2], [4], [9]])
WEIGHT = jnp.where(jnp.arange(S) % 3 == 0, 0.2, 1.0)


def test_fresh_anchors_are_picked_before_repeats_and_these_before_prompts():
    seen = set()
    for seed in range(5):
        picked = pick(jax.random.key(seed), VALID, WEIGHT, 5)
        slots, columns = np.asarray(picked.slots), np.asarray(picked.columns)
        for row, where, valid in zip(slots, columns, np.asarray(VALID), strict=True):
            assert (np.diff(row) > 0).all()
            classes = np.where(valid, np.where(np.arange(S) % 3 == 0, 1, 2), 0)
            assert sorted(classes[row]) == sorted(sorted(classes)[-5:])
            np.testing.assert_array_equal(where[row], np.arange(5))
            assert (np.delete(where, row) == 5).all()
        seen.add(slots.tobytes())
    assert len(seen) > 1, "equal anchors are picked at random"
    assert pick(jax.random.key(0), VALID, WEIGHT, 99).slots.shape == (3, S)


def test_widening_undoes_narrowing_and_is_its_gradient():
    picked = pick(jax.random.key(0), VALID, 1.0, 5)
    x = jax.random.normal(jax.random.key(1), (3, S, 2))
    kept = jnp.zeros((3, S), bool).at[jnp.arange(3)[:, None], picked.slots].set(True)[..., None]
    few, pull = jax.vjp(lambda x: narrowed(x, *picked), x)
    np.testing.assert_array_equal(widened(few, picked.columns), jnp.where(kept, x, 0))
    np.testing.assert_array_equal(widened(few, picked.columns, 7.0), jnp.where(kept, x, 7))
    np.testing.assert_array_equal(pull(few)[0], jnp.where(kept, x, 0))


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_loss_and_gradients_are_those_of_the_picked_anchors(method):
    target, text, head = tiny.target(), three_texts(), tiny.head(method)
    if method == "peagle":
        head.embed = TrainedEmbed(head.embed)
    params, merge = split_model(head)
    valid = passes.slot_is_trained(text)
    picked = pick(jax.random.key(2), valid, WEIGHT, 5)
    kept = jnp.zeros((3, S)).at[jnp.arange(3)[:, None], picked.slots].set(1.0)

    @partial(jax.jit, static_argnames="few")
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, few):
        model, run = merge(params), run_target(target, text)
        options = head_options(repeat_weight=0.3)
        some = picked if few else None
        if method == "peagle":
            rows = passes.text_rows(model, target, run, valid, BLOCKS, options, some)
            mask = BLOCKS.spread(kept)
        else:
            rows = passes.unrolled_rows(model, target, run, valid, options, some)
            mask = jnp.tile(kept, options.num_depths)
        if not few:
            rows = rows._replace(importance=rows.importance * mask, used=rows.used & (mask > 0))
        outcome = passes.compare(model, target, run, options, rows)
        report = [(x * outcome.used).sum() for x in (outcome.kl, outcome.match, outcome.used)]
        return outcome.total, (outcome.count, report)

    got, want = loss(params, True), loss(params, False)
    assert float(want[0][1][1][2]) > 10
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)
