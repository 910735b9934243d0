"""Which drafts a ragged round verifies: what it may depend on, and what that does to the sampled law."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from peagle_jax import step
from peagle_jax.config import EngineConfig
from peagle_jax.drafter import make_drafter
from peagle_jax.plan import SURVIVAL_BINS, DecodePlan, PrefillPlan, RequestParams
from peagle_jax.ragged import verify_chosen
from peagle_jax.sampling import at_tokens
from peagle_jax.survival import (
    BINS,
    Survival,
    bin_of,
    confidence_of,
    confidences,
    init_survival,
    observe,
    observed,
    report,
    select,
    survivals,
)
from tests import tiny
from tests.tiny import causal_attention


def test_selections_of_any_survival_are_the_largest_ones(num_cases):
    """Against a sort; few distinct values, so that ties are everywhere."""

    @settings(max_examples=num_cases("selections", 60), deadline=None, database=None)
    @given(st.data())
    def check(data):
        B, K = 6, 4
        grades = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])
        rows = data.draw(st.lists(st.lists(grades, min_size=K, max_size=K), min_size=B, max_size=B))
        survival = np.minimum.accumulate(np.array(rows, np.float32), axis=1)
        own = np.array(data.draw(st.lists(st.integers(0, K), min_size=B, max_size=B)))
        num_rows = data.draw(st.integers(0, B * K + 3))
        chosen = np.asarray(_select(survival, own, num_rows))
        order = sorted((-survival[b, j], j, b) for b in range(B) for j in range(own[b]))
        kept = [(b, j) for _, j, b in order[:num_rows]]
        assert chosen.tolist() == [sum(b == x for x, _ in kept) for b in range(B)]
        # The chosen drafts of a sequence are its first ones.
        assert all((b, j) in kept for b in range(B) for j in range(chosen[b]))

    check()


_select = jax.jit(select)


def test_survival_never_rises(num_cases):
    rng = np.random.default_rng(0)
    S, J = 400, 32
    for _ in range(num_cases("tables of acceptance", 3)):
        reached = rng.integers(0, 10**6, (J, BINS)).astype(np.float32)
        accepted = np.where(rng.random((J, BINS)) < 0.5, reached, rng.random((J, BINS)) * reached)
        confidence = rng.choice([0.0, 1e-9, 0.3, 0.99, 1.0, np.nan], (S, J)).astype(np.float32)
        place, accepted = np.zeros(S, np.int32), accepted.astype(np.float32)
        state = Survival(*map(jnp.asarray, (confidence, place, reached, accepted)))
        found = np.asarray(survivals(state, state.confidence))
        assert np.isfinite(found).all()
        assert (found[:, 0] <= 1).all()
        assert (np.diff(found, axis=1) <= 0).all()


def test_a_confidence_is_the_largest_probability_whatever_is_drafted():
    logits = np.random.default_rng(1).normal(size=(3, 5, 17)).astype(np.float32) * 9
    want = np.asarray(jax.nn.softmax(logits, axis=-1)).max(-1)
    np.testing.assert_allclose(confidence_of(jnp.asarray(logits)), want, rtol=1e-5)
    edges = [0.0, np.nan, 1 / (1 + np.exp(5.1)), 1 / (1 + np.exp(4.2)), 0.5, 0.99995, 1.0]
    assert bin_of(jnp.array(edges, jnp.float32)).tolist() == [0, 0, 0, 1, 6, BINS - 1, BINS - 1]


def test_a_round_counts_the_drafts_that_were_tested():
    """Accepted ones and the first rejected one; later ones, unverified ones and padding do not count."""
    S, J, num_draft = 5, 4, 3
    confidence = np.full((4, num_draft), 0.5, np.float32)  # bin 6
    confidence[1] = 1.0  # the last bin
    slots = jnp.array([3, 1, 0, S - 1])
    verified, accepted = jnp.array([3, 2, 0, 3]), jnp.array([1, 2, 0, 3])
    given = (jnp.asarray(confidence), slots, (verified, accepted))
    state = observe(init_survival(S, J), *given)
    reached, hits = np.asarray(state.reached), np.asarray(state.accepted)
    assert reached[:, 6].tolist() == [1, 1, 0, 0]
    assert hits[:, 6].tolist() == [1, 0, 0, 0]
    assert reached[:, -1].tolist() == hits[:, -1].tolist() == [1, 1, 0, 0]
    assert reached.sum() == 4
    again = observe(state, *given)
    assert 1.9 < np.asarray(again.reached)[0, 6] < 2, "older counts weigh less"


def test_counts_replace_the_drafters_own_confidence():
    """A drafter that is always sure and right half of the time."""
    state, sure = init_survival(2, 2), jnp.ones((1, 2))
    before = np.asarray(survivals(state, sure))[0]
    assert (before > 0.99).all()
    for accepted in [0, 2] * 400:
        outcome = (jnp.array([2]), jnp.array([accepted]))
        state = _observe(state, sure, jnp.array([0]), outcome)
    after = np.asarray(survivals(state, sure))[0]
    assert abs(after[0] - 0.5) < 0.05
    assert abs(after[1] - after[0]) < 0.05, "the second is only reached where it is right"


_observe = jax.jit(observe)


def test_forced_drafts_are_certain():
    confidence = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    state = init_survival(2, 3)._replace(confidence=confidence)
    blank = np.zeros(2, np.int32)
    plan = DecodePlan(
        slots=np.array([1, 0]), page_table=blank[:, None], pending=blank, constrained=blank,
        forced=np.array([[7, 0, -1], [-1, -1, -1]]),
    )  # fmt: skip
    assert np.array_equal(confidences(state, plan, 2), np.array([[1, 1], [0.1, 0.2]], np.float32))


def test_drafts_of_rounds_that_did_not_count_have_no_confidence():
    """Slot 1 has grown since its last counted round: its drafts are verified, and neither counted nor reported."""
    state = init_survival(4, 2)
    state = state._replace(confidence=jnp.full((4, 2), 0.9), place=jnp.array([5, 5, 5, 0]))
    blank = np.zeros(2, np.int32)
    plan = DecodePlan(
        slots=np.array([0, 1]), page_table=blank[:, None], pending=blank, constrained=None, forced=None
    )  # fmt: skip
    twos = jnp.array([2, 2])
    counted, found = observed(state, plan, jnp.array([5, 7]), (twos, twos, twos), 2)
    assert np.asarray(counted.reached).sum() == np.asarray(counted.accepted).sum() == 2
    assert found.verified.tolist() == [2, 2]
    assert int(found.histogram.sum()) == 2
    assert observed(None, plan, twos, (twos, twos, twos), 2) == (None, None)


def test_a_report_sums_the_survival_of_what_is_verified():
    survival = jnp.array([[0.99, 0.52], [0.4, 0.0], [1.0, 1.0]])
    found = report(survival, jnp.array([2, 1, 0]), jnp.array([1, 1, 0]))
    assert found.verified.tolist() == [1, 1, 0]
    assert float(found.expected) == pytest.approx(1.39)
    filled = {(j, i): int(found.histogram[j, i]) for j, i in np.argwhere(found.histogram)}
    assert filled == {(0, SURVIVAL_BINS - 1): 1, (0, 8): 1, (1, 10): 1}
    assert np.asarray(found.sums)[0, [8, -1]].tolist() == pytest.approx([0.4, 0.99])
    assert float(found.sums.sum()) == pytest.approx(0.99 + 0.52 + 0.4)


V, K, TEMPERATURE = 4, 2, 2.0
TEXTS = np.array([[2, 3, 3, 0, 1, 3], [0, 1, 1, 2, 3, 3]])


def survival_of(state: step.State, slots) -> jax.Array:
    return survivals(state.survival, state.survival.confidence[slots])


def probability_of_drafts(state: step.State, slots) -> jax.Array:
    """A forbidden score: the probability of the drawn token instead of the largest one."""
    drawn = at_tokens(state.draft_probs[slots], state.drafts[slots])
    return jnp.stack([drawn[:, 0], drawn[:, 0] * drawn[:, 1]], axis=1)


class Law:
    """One ragged round over many sequences of two texts, each with a seed of its own."""

    size = 400

    def __init__(self, method: str, draft_sampling: str):
        small = dict(vocab_size=V)
        self.target = tiny.target(seed=3, **small)
        head = tiny.head(method, seed=5, draft_vocab_size=V, **small)
        self.drafter = make_drafter(head, K, draft_sampling)
        S, T = self.size, 8
        self.config = EngineConfig(
            num_draft=K, max_num_seqs=S, max_model_len=16, page_size=16, prefill_chunk=T,
            prefill_rows=S, draft_sampling=draft_sampling, max_logprobs=0,
        )  # fmt: skip
        self.taps = head.config.taps
        self.slots = np.arange(S, dtype=np.int32)
        self.text = self.slots % 2
        prompts = TEXTS[self.text, :-1]
        self.tokens = np.pad(prompts, ((0, 0), (0, T - prompts.shape[1]))).astype(np.int32)
        self.table = 1 + self.slots[:, None]
        self._jitted = cache(lambda *key: jax.jit(partial(self._round, *key)))

    def emitted(self, score, num_rows: int, first_seed: int) -> np.ndarray:
        """The first token that each sequence emits, if the selection ranks drafts by `score`."""
        seeds = np.zeros((self.size, 2), np.uint32)
        seeds[:, 1] = first_seed + self.slots
        return np.asarray(self._jitted(score, num_rows)(self.target, self.drafter, seeds))

    def _round(self, score, num_rows, target, drafter, seeds):
        S = self.size
        fill = lambda value, dtype: jnp.full(S, value, dtype)
        params = RequestParams(
            seed=seeds, temperature=fill(TEMPERATURE, jnp.float32), top_k=fill(0, jnp.int32),
            top_p=fill(1, jnp.float32), min_p=fill(0, jnp.float32), num_draft=fill(K, jnp.int32),
            num_logprobs=fill(-1, jnp.int32), adjusts=fill(0, jnp.int32),
        )  # fmt: skip
        state = step.init_state(target.config, drafter.head.config, self.config)
        state = replace(state, survival=init_survival(S + 1, K))
        plan = PrefillPlan(
            slots=self.slots, tokens=self.tokens, start=fill(0, jnp.int32),
            count=fill(TEXTS.shape[1] - 1, jnp.int32), next_token=TEXTS[self.text, -1],
            page_table=self.table, constrained=fill(0, jnp.int32), params=params,
        )  # fmt: skip
        state, _ = step.prefill(target, drafter, state, plan, taps=self.taps)
        chosen = select(score(state, self.slots), params.num_draft, num_rows)
        plan = DecodePlan(
            slots=jnp.asarray(self.slots), page_table=jnp.asarray(self.table), pending=fill(K, jnp.int32),
            constrained=fill(0, jnp.int32), forced=jnp.full((S, K), -1),
        )  # fmt: skip
        _, output = verify_chosen(
            target, drafter, state, plan, chosen, num_rows=num_rows, taps=self.taps
        )
        return output.packed[:, 0]

    def p_value(self, score, num_rows: int, count: int) -> float:
        """Chi-square test of `count` texts or more against the target's distribution."""
        seeds = range(0, count, self.size)
        observed = np.zeros((2, V))
        for seed in seeds:
            np.add.at(observed, (self.text, self.emitted(score, num_rows, seed)), 1)
        where = jnp.broadcast_to(jnp.arange(TEXTS.shape[1]), TEXTS.shape)
        hidden, _, _ = self.target(jnp.asarray(TEXTS), where, [None] * 3, causal_attention)
        logits = self.target.unembed(hidden[:, -1])
        p = np.asarray(jax.nn.softmax(logits / TEMPERATURE, axis=-1), np.float64)
        expected = p / p.sum(axis=1, keepdims=True) * observed.sum(axis=1, keepdims=True)
        return stats.chisquare(observed.ravel(), expected.ravel(), ddof=1).pvalue


law_of = cache(Law)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("share", [0.6, 1.2])
def test_a_token_has_the_targets_law_whichever_drafts_are_verified(
    method, draft_sampling, share, num_cases
):
    law = law_of(method, draft_sampling)
    count = num_cases("tokens of ragged rounds against the target's law", 3000, least=3000)
    assert law.p_value(survival_of, int(share * law.size), count) > 1e-3


@pytest.mark.slow
def test_a_selection_that_looks_at_the_drawn_drafts_changes_the_law():
    """So the test above can fail: the same round, with q_j(d_j) in place of max_v q_j(v)."""
    law = law_of("peagle", "sample")
    assert law.p_value(probability_of_drafts, int(0.6 * law.size), 3000) < 1e-6
