"""A head that is trained on the texts of an engine, and goes back to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.models import weight_order
from peagle_jax.training.rollouts import Rollouts, drafter_state, drafter_step, head_of, texts_of
from peagle_jax.training.stored_text import Text
from tests import tiny
from tests.programs import one_bucket

CONFIG = EngineConfig(
    num_draft=3, max_num_seqs=4, max_model_len=64, page_size=4, prefill_chunk=16, prefill_rows=2
)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["selector", "eagle3", "dflash"])
def test_a_head_learns_the_texts_of_its_target_and_drafts_them(method):
    target, head = tiny.target(**tiny.ONE_LAYER), tiny.head(method, num_taps=1, taps=(0,))
    engine = one_bucket(Engine(target, head, CONFIG))
    prompts = np.random.default_rng(3).integers(2, 128, (4, 5)).tolist()
    rollout = lambda: engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    before = rollout()
    batch = Rollouts(target, texts_of(before, 25))
    state, losses = drafter_state(head, learning_rate=1e-2), []
    for _ in range(60):
        state, report = drafter_step(state, batch)
        total, count = report["loss"]
        losses.append(float(total / count))
    assert losses[-1] < 0.7 * losses[0]
    assert state.update._cache_size() == 1
    engine.update_weights(head=head_of(state))
    after = rollout()
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert sum(one.accepted for one in after) > 2 * sum(one.accepted for one in before)
    if method == "selector":
        assert jax.tree.all(
            jax.tree.map(
                jnp.array_equal,
                nnx.state(head_of(state).selector),
                nnx.state(head.selector),
            )
        )


@pytest.mark.slow
def test_an_engines_own_models_train_as_those_that_were_loaded(monkeypatch):
    """On a CPU of few cores they are in tiles of columns."""
    monkeypatch.setattr(weight_order, "MOST_CORES", 1000)
    models = tiny.target(**tiny.ONE_LAYER), tiny.head("selector", num_taps=1, taps=(0,))
    tiled = jax.tree.map(jnp.copy, models)
    weight_order.tile_columns(*tiled)
    assert all(any(leaf.ndim == 3 for leaf in jax.tree.leaves(one)) for one in tiled)
    losses, heads = [], []
    texts = Text(np.arange(50, dtype=np.int32).reshape(2, 25), np.array([3, 5]), np.array([25, 20]))
    for target, head in (models, tiled):
        state, report = drafter_step(
            drafter_state(head, learning_rate=0.1), Rollouts(target, texts)
        )
        losses.append(float(report["loss"][0]))
        heads.append(jax.tree.leaves(head_of(state)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for one, other in zip(*heads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_texts_are_cut_and_padded_to_one_length():
    class Done:
        prompt, tokens = [5, 6, 7], [8, 9]

    tokens, prompt, length, *_ = texts_of([Done, Done], 4)
    assert tokens.tolist() == [[5, 6, 7, 8]] * 2
    assert texts_of([Done], 7).tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0]]
    assert (prompt.tolist(), length.tolist()) == ([3, 3], [4, 4])
    assert texts_of([Done], 2).prompt.tolist() == [2]
