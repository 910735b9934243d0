"""A head that is trained on the texts of an engine, and goes back to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.training.rollouts import Rollouts, drafter_state, drafter_step, head_of, texts_of
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


def test_texts_are_cut_and_padded_to_one_length():
    class Done:
        prompt, tokens = [5, 6, 7], [8, 9]

    tokens, prompt, length, *_ = texts_of([Done, Done], 4)
    assert tokens.tolist() == [[5, 6, 7, 8]] * 2
    assert texts_of([Done], 7).tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0]]
    assert (prompt.tolist(), length.tolist()) == ([3, 3], [4, 4])
    assert texts_of([Done], 2).prompt.tolist() == [2]
