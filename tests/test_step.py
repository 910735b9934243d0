"""The step between rounds: caches, drafts and counters are those of a fresh run."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from peagle_jax.config import EngineConfig
from peagle_jax.method import drafter
from peagle_jax.method.drafter import make_drafter
from peagle_jax.method.step import State
from peagle_jax.models.cache import LayerCache, PageCache
from tests import tiny
from tests.rounds import Rig

J, B, LENGTH = 3, 4, 48
PROMPTS = np.array([1, 5, 10, 14])
CONFIG = EngineConfig(
    num_draft=J,
    max_num_seqs=B,
    max_model_len=LENGTH,
    page_size=4,
    prefill_chunk=LENGTH,
    draft_sampling="sample",
)


@pytest.fixture(scope="module", params=["peagle", "eagle3", "dflash"])
def rig(request) -> Rig:
    text = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (B, LENGTH))
    # A block has more rows than drafts are asked for.
    trained = dict(trained_num_draft=J + 2) if request.param == "dflash" else {}
    drafter = make_drafter(tiny.head(request.param, **trained), J, "sample")
    return Rig(tiny.target(), drafter, CONFIG, text)


@pytest.fixture(scope="module")
def prefilled(rig) -> State:
    return rig.prefill(rig.new_state(), 0, PROMPTS)[0]


def check_same_drafts(state: State, other: State) -> None:
    """Same drafts from the same probabilities, in the real slots.

    The tolerance is for sums over other numbers of rows; probabilities of a wrong history differ in
    the first digits (see `test_one_stale_cache_entry_changes_the_drafts`).
    """
    np.testing.assert_allclose(state.draft_probs[:B], other.draft_probs[:B], atol=2e-5)
    assert np.array_equal(state.drafts[:B], other.drafts[:B])
    assert np.array_equal(state.length, other.length)
    assert np.array_equal(state.last_token[:B], other.last_token[:B])


def test_drafts_after_any_rounds_equal_those_of_a_fresh_run_over_the_prefix(rig, prefilled):
    rng = np.random.default_rng(0)
    state, seen = prefilled, []
    for _ in range(9):
        state, _ = rig.round(state, rng.integers(0, J + 1, B))
        fresh, _ = rig.prefill(rig.new_state(), 0, np.asarray(state.length)[:B])
        check_same_drafts(state, fresh)
        seen.append(np.asarray(state.drafts)[:B])
    assert len(np.unique(np.concatenate(seen))) > 20, "a drafter that always says the same"


@pytest.mark.sampled(0, slow=1)
def test_drafts_after_rounds_of_any_k_equal_those_of_a_fresh_run(rig, prefilled):
    """Also after K = 0: the drafter's cache holds every position of the text."""
    rng, state = np.random.default_rng(1), prefilled
    for K in (0, 0, 2, 1, 0, J, 0, 1, J):
        before = np.asarray(state.length)[:B]
        state, output = rig.round(state, rng.integers(0, J + 1, B), num_draft=K)
        length = np.asarray(state.length)[:B]
        assert output.packed.shape == (B, K + 2)
        assert ((length - before >= 1) & (length - before <= K + 1)).all()
        fresh, _ = rig.prefill(rig.new_state(), 0, length, num_draft=K)
        for slot in range(B):
            got, want = (rows_of(s.drafter_cache, rig, slot, length[slot]) for s in (state, fresh))
            np.testing.assert_allclose(got, want, atol=1e-5)
        assert np.array_equal(state.drafts[:B, :K], fresh.drafts[:B, :K])
        assert np.array_equal(output.drafts, state.drafts[:B, :K]), "not what the host reads"
        np.testing.assert_allclose(state.draft_probs[:B, :K], fresh.draft_probs[:B, :K], atol=2e-5)


@pytest.mark.parametrize(("method", "trained"), [("dflash", J), ("dflash2", J), ("dspark", J + 2)])
def test_fewer_drafts_are_the_first_ones_of_a_trained_block(method, trained):
    text = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (B, LENGTH))
    drafter = make_drafter(tiny.head(method, trained_num_draft=trained), J, "argmax")
    config = replace(CONFIG, draft_sampling="argmax")
    rig = Rig(tiny.target(), drafter, config, text)
    drafts = lambda K: rig.prefill(rig.new_state(), 0, PROMPTS, num_draft=K)[0].drafts[:B, :K]
    assert np.array_equal(drafts(1), drafts(J)[:, :1])
    assert np.array_equal(drafts(2), drafts(J)[:, :2])


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("pending", [0, 1, 2])
def test_stale_drafts_are_not_verified(greedy_rig, pending):
    """All drafts in the state are right, but only the first `pending` come from the call before."""
    state, _ = greedy_rig.prefill(greedy_rig.new_state(), 0, PROMPTS)
    _, output = greedy_rig.round(state, [J] * B, pending=pending)
    assert np.asarray(output.packed)[:, -1].tolist() == [pending + 1] * B


def rows_of(cache: list[LayerCache], rig: Rig, slot: int, length: int) -> np.ndarray:
    """Keys and values of positions 0..length-1 of a slot, all layers."""
    pages = rig.page_table[slot]
    return np.stack(
        [np.asarray(x)[pages].reshape(-1, *x.shape[2:])[:length] for kv in cache for x in kv]
    )


def test_the_caches_hold_exactly_the_committed_text(rig, prefilled):
    """Positions 0..length-1 as a fresh run writes them: nothing of drafts that were rejected."""
    state = prefilled
    for accepted in ([0, 1, 2, 3], [3, 0, 1, 0], [2, 2, 0, 1]):
        state, _ = rig.round(state, accepted)
    fresh, _ = rig.prefill(rig.new_state(), 0, np.asarray(state.length)[:B])
    for slot, length in enumerate(np.asarray(state.length)[:B]):
        for name in ("target_cache", "drafter_cache"):
            got, want = (rows_of(getattr(s, name), rig, slot, length) for s in (state, fresh))
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_one_stale_cache_entry_changes_the_drafts(rig, prefilled):
    """The comparisons above would see one wrong key and value of one position."""
    page, offset = rig.page_table[2, 1], 1  # position 5 of slot 2
    stale = [PageCache(kv.k, kv.v.at[page, offset].add(1.0)) for kv in prefilled.drafter_cache]
    good, _ = rig.round(prefilled, [0] * B)
    bad, _ = rig.round(replace(prefilled, drafter_cache=stale), [0] * B)
    change = np.abs(np.asarray(good.draft_probs - bad.draft_probs)).max(axis=(1, 2))
    assert change[2] > 1e-3
    assert change[[0, 1, 3]].max() == 0


@pytest.mark.parametrize("chunks", [[4, 9], [1, 2, 3], [13]])
def test_a_prompt_in_chunks_gives_the_drafts_of_a_whole_one(rig, prefilled, chunks):
    state, start = rig.new_state(), np.zeros(B, int)
    for end in chunks:
        going_on = np.flatnonzero(end < PROMPTS)
        state, output = rig.prefill(state, start, end, final=False, rows=going_on)
        start = np.where(np.isin(np.arange(B), going_on), end, start)
        assert not np.asarray(output.packed)[:, -1].any(), "a prompt that goes on emits nothing"
        assert np.array_equal(np.asarray(state.length)[:B], start)
    state, output = rig.prefill(state, start, PROMPTS)
    assert np.asarray(output.packed)[:, -1].tolist() == [1] * B
    check_same_drafts(state, prefilled)
    for slot, length in enumerate(PROMPTS):
        got, want = (rows_of(s.drafter_cache, rig, slot, length) for s in (state, prefilled))
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_lengths_and_last_tokens_follow_the_text(rig, prefilled):
    state, length = prefilled, PROMPTS
    everyone = np.arange(B)
    for accepted in ([3, 2, 1, 0], [0, 3, 0, 1]):
        assert np.array_equal(np.asarray(state.length), [*length, 0])
        assert np.array_equal(np.asarray(state.last_token)[:B], rig.text[everyone, length])
        state, output = rig.round(state, accepted)
        tokens, count = np.asarray(output.packed)[:, :-1], np.asarray(output.packed)[:, -1]
        assert np.array_equal(count, np.array(accepted) + 1)
        for b in everyone:
            said = rig.text[b, length[b] + 1 : length[b] + 1 + count[b]]
            assert np.array_equal(tokens[b, : count[b]], said)
        length = length + count


def test_slots_outside_of_a_call_are_untouched_and_the_dummy_stays_empty(rig, prefilled):
    state, _ = rig.round(prefilled, [1, 1, 2, 0], rows=[1, 2])
    assert np.asarray(state.length).tolist() == [1, 7, 13, 14, 0]
    for name in ("last_token", "drafts", "draft_probs"):
        before, after = (np.asarray(getattr(s, name))[[0, 3]] for s in (prefilled, state))
        assert np.array_equal(before, after), name
    state, _ = rig.prefill(state, 0, 6, rows=[3])
    assert np.asarray(state.length).tolist() == [1, 7, 13, 6, 0]
    state, _ = rig.round(state, [0] * B, rows=[])
    assert np.asarray(state.length).tolist() == [1, 7, 13, 6, 0]
    for slot in (0, 1, 2):  # what slot 3 threw away and the padding wrote nowhere else
        got, want = (rows_of(s.target_cache, rig, slot, PROMPTS[slot]) for s in (state, prefilled))
        assert np.array_equal(got, want)


@pytest.fixture(scope="module")
def greedy_rig() -> Rig:
    """A rig whose text is what the target itself says after each prompt."""
    target = tiny.target()
    text = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (B, 24))
    for i in range(PROMPTS.min(), 24):
        best = tiny.logits(target, text)[:, i - 1].argmax(-1)
        text[:, i] = np.where(i >= PROMPTS, best, text[:, i])
    drafter = make_drafter(tiny.head(), J, "argmax")
    config = replace(CONFIG, max_model_len=24, prefill_chunk=16, draft_sampling="argmax")
    return Rig(target, drafter, config, text, greedy=True)


@pytest.mark.parametrize(
    ("allowed", "right", "survive"),
    [
        ([3, 3, 3, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [3, 3, 3, 3], [0, 1, 2, 3]),
        ([2, 0, 3, 1], [1, 2, 0, 1], [1, 0, 0, 1]),
    ],
)
def test_a_requests_own_number_of_drafts_bounds_what_it_accepts(
    greedy_rig, allowed, right, survive
):
    state, output = greedy_rig.prefill(greedy_rig.new_state(), 0, PROMPTS)
    first = greedy_rig.text[np.arange(B), PROMPTS]
    assert np.array_equal(np.asarray(output.packed), np.stack([first, np.ones(B)], axis=1))
    assert state.params.num_draft.tolist() == [J] * B + [0]
    state, output = greedy_rig.round(state, allowed, right=right)
    packed = np.asarray(output.packed)
    assert packed[:, -1].tolist() == [n + 1 for n in survive]
    for b, n in enumerate(survive):
        said = greedy_rig.text[b, PROMPTS[b] + 1 : PROMPTS[b] + 2 + n]
        assert np.array_equal(packed[b, : n + 1], said)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("num_draft", [1, J])
def test_rows_that_are_repeated_for_whole_tiles_change_nothing(num_draft, monkeypatch):
    text = np.random.default_rng(2).integers(2, tiny.TARGET.vocab_size, (B, LENGTH))
    config, head, states = replace(CONFIG, num_draft=num_draft), tiny.head("peagle"), []
    for more in (0, 3):
        monkeypatch.setattr(drafter, "whole_rows", lambda batch, rows, more=more: rows + more)
        rig = Rig(tiny.target(), make_drafter(head, num_draft, "sample"), config, text)
        state = rig.prefill(rig.new_state(), 0, PROMPTS)[0]
        states.append(rig.round(state, np.array([0, 1, num_draft, 0]))[0])
    check_same_drafts(*states)
    for one, other in zip(*map(jax.tree.leaves, (s.drafter_cache for s in states)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
