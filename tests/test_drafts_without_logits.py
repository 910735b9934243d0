"""Greedy drafts of the LM head's argmax, without logits: the drafts and the text are those with logits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import Engine, EngineConfig, SamplingParams, layers
from peagle_jax.draft_head import DraftHead
from peagle_jax.drafter import DraftInputs, Proposal, _drafts, make_drafter
from tests import programs, tiny

J = 3
CONFIG = EngineConfig(max_num_seqs=2, max_model_len=48, page_size=4, prefill_chunk=16, num_draft=J)
PROMPTS = [[5, 9, 2, 7], [11, 3]]
HEADS = {
    "peagle": {},
    "eagle3": dict(method="eagle3"),
    "the-targets-lm-head": dict(own_lm_head=False),
    "pruned": dict(draft_vocab_size=72),
}
each_head = pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)


@pytest.mark.parametrize("changes", [HEADS["peagle"], HEADS["eagle3"]], ids=["peagle", "eagle3"])
@pytest.mark.sampled(1, slow=2)
def test_text_and_acceptance_are_those_with_logits(changes, monkeypatch):
    without = []

    def argmax(self, target, hidden, original=DraftHead.argmax):
        without.append(True)
        return original(self, target, hidden)

    monkeypatch.setattr(DraftHead, "argmax", argmax)
    target, head = tiny.target(), tiny.head(**changes)
    done = []
    for without_logits in (False, True):
        assert not without
        drafter = make_drafter(head, J, "argmax", without_logits=without_logits)
        with programs.shared(controls=False):
            engine = programs.one_bucket(Engine(target, head, CONFIG, drafter=drafter))
        for temperature in (0, 0.8):
            params = SamplingParams(max_tokens=14, temperature=temperature, seed=4)
            done.append(
                [(x.tokens, x.rounds, x.accepted) for x in engine.generate(PROMPTS, params)]
            )
    assert without, "drafts had logits"
    assert done[:2] == done[2:]


def proposal(changes: dict, sampling: str = "argmax", **confidence) -> tuple[Proposal, Proposal]:
    """Drafts of five sequences with logits, and those that may do without them."""
    target, head = tiny.target(), tiny.head(**changes)
    if head.d2t is not None:
        head.d2t[...] = jnp.arange(head.config.draft_vocab_size) // 2
    keys = jax.random.split(jax.random.key(6), 6)
    out = jax.random.normal(keys[5], (5, J + 1, head.config.hidden_size))
    zeros = jnp.zeros(5, jnp.int32)
    inputs = DraftInputs(
        zeros[:, None], out[:, :1], zeros + 1, zeros, zeros[:, None], zeros, keys[:5], jnp.ones(5)
    )
    positions = jnp.zeros((5, J), jnp.int32) + jnp.arange(J)
    find = lambda without, inputs: _drafts(
        make_drafter(head, J, sampling, without_logits=without), target, out, positions, inputs
    )
    return find(False, inputs), find(True, replace(inputs, **confidence))


@each_head
def test_drafts_are_those_with_logits(changes):
    wanted, found = proposal(changes, with_confidence=False)
    assert (found.probs, found.confidence) == (None, None)
    assert found.tokens.dtype == wanted.tokens.dtype
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert len(np.unique(found.tokens)) > 1


@pytest.mark.parametrize("need", ["confidence", "scale", "sampling"])
def test_logits_are_computed_where_something_needs_them(need):
    changes = dict(logit_scale=0.3) if need == "scale" else {}
    sampling = "sample" if need == "sampling" else "argmax"
    wanted, found = proposal(changes, sampling, with_confidence=need == "confidence")
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.confidence, wanted.confidence)


@pytest.mark.parametrize("tied", [True, False])
def test_the_kernels_find_the_largest_logit_of_their_own_products(tied, monkeypatch):
    for name in ("linear", "linear_argmax"):
        kernel = partial(getattr(layers, name), implementation="mosaic_gpu")
        monkeypatch.setattr(layers, name, kernel)
    target = tiny.target(dtype="bfloat16")
    head = tiny.head(dtype="bfloat16", own_lm_head=not tied)
    hidden = jax.random.normal(jax.random.key(3), (2, 6, head.config.hidden_size), jnp.bfloat16)
    found = head.argmax(target, hidden)
    assert found.shape == (2, 6)
    np.testing.assert_array_equal(found, jnp.argmax(head.logits(target, hidden), axis=-1))
    assert int(head.argmax(target, hidden[1, 2])) == int(found[1, 2])
