"""A ragged round decides as a dense one in which each sequence verifies the same drafts."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import step
from peagle_jax.config import EngineConfig
from peagle_jax.drafter import make_drafter
from peagle_jax.flat_rows import FlatRows
from peagle_jax.plan import DecodePlan, RequestParams
from peagle_jax.ragged import ragged_step, verify_chosen
from peagle_jax.survival import init_survival
from tests import tiny
from tests.rounds import Rig
from tests.test_step import rows_of

K, B, LENGTH = 3, 5, 56
PROMPTS = np.array([1, 5, 10, 14, 9])


def test_flat_rows_list_the_rows_of_each_sequence():
    rows = FlatRows.of(jnp.array([2, 0, 1]), 8, 3)
    assert rows.sequence.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert rows.row.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert rows.is_real.tolist() == [True] * 6 + [False] * 2
    assert rows.at.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5]]


class Rounds:
    """Rounds over B sequences of a tiny target with mixed sampling parameters."""

    def __init__(self, family: str, method: str, draft_sampling: str):
        config = EngineConfig(
            num_draft=K, max_num_seqs=B + 1, max_model_len=LENGTH, page_size=4, prefill_chunk=16,
            draft_sampling=draft_sampling, max_logprobs=3,
        )  # fmt: skip
        text = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (B, LENGTH))
        self.drafter = make_drafter(tiny.head(method), K, draft_sampling)
        self.rig = Rig(tiny.target(**tiny.FAMILIES.get(family, {})), self.drafter, config, text)
        rules = dict(taps=self.drafter.head.config.taps, max_logprobs=3)
        self._dense = jax.jit(partial(step.speculative_step, **rules))
        self._chosen = jax.jit(partial(verify_chosen, **rules), static_argnames="num_rows")
        self._ragged = jax.jit(partial(ragged_step, **rules), static_argnames="num_rows")
        params = RequestParams(
            seed=np.stack([np.zeros(B), 7 + np.arange(B)], axis=1).astype(np.uint32),
            temperature=np.array([0, 1, 1, 0.7, 3], np.float32),
            top_k=np.array([0, 0, 5, 0, 0], np.int32),
            top_p=np.array([1, 1, 1, 0.9, 1], np.float32),
            min_p=np.zeros(B, np.float32),
            num_draft=np.array([K, K, K, 1, 0], np.int32),
            num_logprobs=np.array([2, -1, 3, -1, 0], np.int32),
            adjusts=np.array([1, 0, 0, 1, 1], np.int32),
        )
        new = replace(self.rig.new_state(), survival=init_survival(B + 2, K))
        state, _ = self.rig.prefill(new, 0, PROMPTS)
        put = lambda all_, new: all_.at[:B].set(new)
        penalties = state.controls._replace(presence=state.controls.presence.at[:B].set(3.0))
        new_params = jax.tree.map(put, state.params, params)
        self.start = replace(state, params=new_params, controls=penalties)
        # One slot is padding, as in a batch bucket that is not full.
        self.plan = DecodePlan(
            slots=np.array([*range(B), B + 1], np.int32),
            page_table=np.pad(self.rig.page_table, ((0, 1), (0, 0))),
            pending=np.array([K] * B + [0], np.int32),
            constrained=np.zeros(B + 1, np.int32),
            forced=np.full((B + 1, K), -1, np.int32),
        )

    def may_verify(self) -> np.ndarray:
        return np.array([K, K, K, 1, 0, 0])

    def dense(self, state, chosen):
        """The round in which each sequence's own number of drafts is `chosen`."""
        own = state.params.num_draft
        limited = state.params._replace(num_draft=own.at[self.plan.slots].set(chosen))
        found, output = self._dense(
            self.rig.target, self.drafter, replace(state, params=limited), self.plan
        )
        return replace(found, params=state.params), output

    def chosen(self, state, chosen, num_rows):
        chosen = jnp.asarray(chosen, jnp.int32)
        args = (self.rig.target, self.drafter, state, self.plan, chosen)
        return self._chosen(*args, num_rows=num_rows)

    def ragged(self, state, num_rows):
        return self._ragged(self.rig.target, self.drafter, state, self.plan, num_rows=num_rows)


rounds_of = cache(Rounds)


def check_same(got, want) -> None:
    """Same tokens, logprobs, texts, caches and drafts; numbers within the rounding of another shape."""
    (state, output), (other, expected) = got, want
    count = np.asarray(output.packed)[:, -1]
    assert np.array_equal(count, np.asarray(expected.packed)[:, -1])
    for b in range(B):
        n = count[b]
        assert np.array_equal(output.packed[b, :n], expected.packed[b, :n])
        np.testing.assert_allclose(output.logprobs[b, :n], expected.logprobs[b, :n], atol=1e-4)
        assert np.array_equal(output.top_ids[b, :n], expected.top_ids[b, :n])
        np.testing.assert_allclose(
            output.top_logprobs[b, :n], expected.top_logprobs[b, :n], atol=1e-4
        )
    assert np.array_equal(state.length, other.length)
    assert np.array_equal(state.last_token[:B], other.last_token[:B])
    assert np.array_equal(state.drafts[:B], other.drafts[:B])
    assert np.array_equal(state.controls.counts, other.controls.counts)
    if state.draft_probs is not None:
        np.testing.assert_allclose(state.draft_probs[:B], other.draft_probs[:B], atol=1e-4)
    np.testing.assert_allclose(
        state.survival.confidence[:B], other.survival.confidence[:B], atol=1e-4
    )
    for name in ("reached", "accepted"):
        assert np.array_equal(getattr(state.survival, name), getattr(other.survival, name)), name


@pytest.mark.slow
@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(
    ("family", "method", "draft_sampling"),
    [
        ("llama", "peagle", "argmax"),
        ("llama", "eagle3", "sample"),
        ("gpt_oss", "peagle", "sample"),
        ("gemma4", "peagle", "argmax"),
        ("qwen3_moe", "eagle3", "argmax"),
    ],
)
def test_any_selection_decides_as_the_dense_round(family, method, draft_sampling):
    """Rounds with windows, experts, sampling, filters, penalties, logprobs, a request without drafts, and padding."""
    rounds, rng = rounds_of(family, method, draft_sampling), np.random.default_rng(3)
    state, most = rounds.start, rounds.may_verify()
    lengths = np.asarray(state.length)[:B]
    for _ in range(6):
        chosen = rng.integers(0, most + 1)
        got = rounds.chosen(state, chosen, 7)
        check_same(got, rounds.dense(state, chosen))
        assert got[1].report.verified.tolist() == chosen.tolist()
        state = got[0]
    grown = np.asarray(state.length)[:B] - lengths
    assert (grown >= 6).all()


def test_unverified_and_padding_rows_write_no_page_of_a_sequence():
    """Positions past a sequence's last row keep their bits, and so do pages that belong to no sequence."""
    rounds = rounds_of("llama", "peagle", "argmax")
    before = rounds.start
    chosen = np.array([1, 0, 2, 1, 0, 0])
    after, _ = rounds.chosen(before, chosen, 7)
    length, most = np.asarray(before.length), LENGTH
    for slot in range(B):
        old, new = (rows_of(s.target_cache, rounds.rig, slot, most) for s in (before, after))
        written = np.flatnonzero((old != new).any(axis=(0, 2, 3)))
        assert written.tolist() == [length[slot] + j for j in range(chosen[slot] + 1)]
    free = np.setdiff1d(np.arange(1, rounds.rig.config.total_pages), rounds.rig.page_table)
    assert len(free)
    for old, new in zip(before.target_cache, after.target_cache, strict=True):
        assert all(np.array_equal(a[free], b[free]) for a, b in zip(old, new, strict=True))


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize("num_rows", [5, 0, 2, 11])
def test_a_round_verifies_the_drafts_that_are_likeliest_to_stand(num_rows):
    rounds = rounds_of("llama", "peagle", "argmax")
    likely = np.array([[0.9, 0.9, 0.1], [0.2, 0.2, 0.2], [0.99, 0.99, 0.99], [0.95] * 3, [0.9] * 3])
    survival = rounds.start.survival
    survival = survival._replace(confidence=survival.confidence.at[:B].set(likely))
    state = replace(rounds.start, survival=survival)
    got = rounds.ragged(state, num_rows)
    chosen = np.asarray(got[1].report.verified)
    wanted = {0: [0, 0, 0, 0, 0], 2: [0, 0, 2, 0, 0], 5: [1, 0, 3, 1, 0], 11: [3, 3, 3, 1, 0]}
    assert chosen.tolist() == [*wanted[num_rows], 0]
    check_same(got, rounds.dense(state, chosen))
