"""Rounds simulated over texts on the host, against their definitions in plain loops."""

import numpy as np
import pytest

from peagle_jax.training.acceptance import earlier, leading, ngram_run, repeats, walk


def _ends_before(tokens: list[int], p: int, n: int) -> list[int]:
    """Earlier positions at which the last n tokens up to p also end."""
    suffix = tokens[p - n + 1 : p + 1]
    return [j for j in range(n - 1, p) if tokens[j - n + 1 : j + 1] == suffix]


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_earlier_run_is_found(seed):
    tokens = np.random.default_rng(seed).integers(0, 2 + seed, 40)
    found, text = earlier(tokens), tokens.tolist()
    for p in range(len(text)):
        longest = max((n for n in range(1, p + 1) if _ends_before(text, p, n)), default=0)
        assert found.length[p] == longest
        if longest:
            assert found.end[p] == _ends_before(text, p, longest)[-1]


def test_copied_drafts_are_the_known_tokens_after_the_earlier_run():
    #                   0  1  2  3  4  5  6  7  8  9
    tokens = np.array([5, 6, 7, 8, 9, 5, 6, 7, 8, 1])
    right, matched = ngram_run(tokens, earlier(tokens), min_match=2, num_draft=4)
    # Slot 5 has seen up to x_6 = 6; "5 6" ended at 1, so it drafts 7 8 9 5, of which two are right.
    assert matched.tolist() == [False] * 5 + [True] * 3 + [False] * 2
    assert right[5:8].tolist() == [2, 1, 0]


def test_nothing_is_copied_from_beyond_what_is_known():
    tokens = np.array([3, 3, 3, 3, 3, 3])
    right, _ = ngram_run(tokens, earlier(tokens), min_match=1, num_draft=4)
    # The newest earlier run ends one token back, so one known token follows it.
    assert right.tolist() == [1, 1, 1, 1, 0, 0]


def test_rounds_of_a_text_are_those_of_the_engine():
    match = np.zeros((1, 3, 10), bool)
    match[0, :, 2] = True  # the round at slot 2 accepts three drafts
    match[0, 0, 6] = True  # the round at slot 6 accepts one
    rounds = walk(leading(match, 3), np.array([3]), np.array([10]))
    assert [x.tolist() for x in rounds] == [[0, 0], [2, 6], [3, 1], [4, 2]]
    assert rounds.acceptance_length == 3.0
    assert rounds.take(rounds.slot > 2).acceptance_length == 2.0
    assert rounds.take(rounds.slot > 9).acceptance_length == 0.0


def test_a_round_is_a_repeat_by_its_newest_known_token():
    tokens = np.tile(np.arange(10), 2)
    assert np.flatnonzero(repeats([earlier(tokens)], 20)[0]).tolist() == [16, 17, 18]
