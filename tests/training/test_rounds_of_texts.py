"""Rounds simulated over texts on the host."""

import numpy as np

from peagle_jax.training.acceptance import leading, lengths, repeats, walk
from peagle_jax.training.stored_text import Text


def _match() -> np.ndarray:
    match = np.zeros((1, 3, 10), bool)
    match[0, :, 2] = True  # the round at slot 2 accepts three drafts
    match[0, 0, 6] = True  # the round at slot 6 accepts one
    return match


def test_rounds_of_a_text_are_those_of_the_engine():
    """Prompt 3, length 10: rounds start at slot 2 (4 tokens), and 6 (2 tokens; slots 6 and 7)."""
    rounds = walk(leading(_match(), 3), np.array([3]), np.array([10]))
    assert [x.tolist() for x in rounds] == [[0, 0], [2, 6], [3, 1], [4, 2]]
    assert rounds.acceptance_length == 3.0
    assert rounds.take(rounds.slot > 2).acceptance_length == 2.0
    assert rounds.take(rounds.slot > 9).acceptance_length == 0.0


def test_a_round_is_a_repeat_by_its_newest_known_token():
    tokens = np.stack([np.tile(np.arange(10), 2), np.arange(20)])
    first, second = repeats(tokens)
    assert np.flatnonzero(first).tolist() == [16, 17, 18]
    assert not second.any()


def test_repeats_count_in_the_first_length_alone():
    text = Text(np.tile(np.arange(10), 2)[None], np.array([16]), np.array([20]))
    match = np.zeros((1, 3, 20), bool)
    match[0, 0, 16] = True  # a repeat that accepts one draft; slot 15 is fresh and accepts none
    assert lengths(match, text, 3) == dict(acceptance_length=1.5, fresh_acceptance_length=1.0)
