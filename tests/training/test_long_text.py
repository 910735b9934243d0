"""Lengths of the texts: every N-th step has longer ones (`--long-text DIR`), or all steps have pieces
(`--text-length N`); steps have equal numbers of tokens."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.training.drafter import every_nth, training_batches
from peagle_jax.training.passes import slot_is_trained
from peagle_jax.training.stored_text import Text, pieces
from tests import tiny
from tests.training.test_heads import _options

RUN = SimpleNamespace(seed=0, microbatches=1)


def _texts(count: int, length: int) -> Text:
    """Text i consists of token i."""
    tokens = np.broadcast_to(np.arange(count)[:, None], (count, length))
    return Text(tokens, np.full(count, 2), np.full(count, length))


def _stored(folder, text: Text):
    np.savez(folder / "train.npz", **text.arrays())
    return folder


def test_an_epoch_has_every_text_once_and_the_next_another_order():
    batch = training_batches(_texts(6, 8), replace(_options(), batch=2), RUN, tiny.TARGET)
    epochs = [[tuple(batch(step).tokens[:, 0]) for step in range(i, i + 3)] for i in (0, 3)]
    for epoch in epochs:
        assert sorted(sum(epoch, ())) == list(range(6))
    assert epochs[0] != epochs[1]


def test_every_third_step_has_longer_texts_and_both_kinds_go_on_where_they_stopped(tmp_path):
    plain = replace(_options(), batch=4)
    longer = replace(plain, long_text=_stored(tmp_path, _texts(20, 16)), long_every=3)
    batch, usual = training_batches(_texts(40, 8), longer, RUN, tiny.TARGET), _texts(40, 8)
    shapes = [batch(step).tokens.shape for step in range(6)]
    assert shapes == [(4, 8), (4, 8), (2, 16)] * 2
    short = [batch(step).tokens for step in (0, 1, 3, 4, 6)]
    for step, tokens in enumerate(short):
        np.testing.assert_array_equal(
            tokens, training_batches(usual, plain, RUN, tiny.TARGET)(step).tokens
        )
    turns = every_nth(3, lambda turn: ("long", turn), lambda turn: ("usual", turn))
    assert [turns(step) for step in range(2, 12, 3)] == [("long", turn) for turn in range(4)]


@pytest.mark.parametrize(
    ("count", "length", "microbatches"), [(1, 16, 1), (9, 64, 1), (9, 16, 4)],
    ids=["too few", "longer than a step", "no multiple"],
)  # fmt: skip
def test_longer_texts_that_make_up_no_step_are_refused(tmp_path, count, length, microbatches):
    options = replace(_options(), batch=4, long_text=_stored(tmp_path, _texts(count, length)))
    run = SimpleNamespace(seed=0, microbatches=microbatches)
    with pytest.raises(ConfigError, match=r"^--long-text: "):
        training_batches(_texts(8, 8), options, run, tiny.TARGET)


def test_pieces_have_the_generated_tokens_of_the_texts():
    """Prompts of 3, 4, 0 and 7 tokens, ends at 12, 9, 6 and 8, pieces of 4."""
    tokens = np.arange(48).reshape(4, 12)
    ends = np.array([3, 4, 0, 7]), np.array([12, 9, 6, 8])
    found = pieces(Text(tokens, *ends), 4)
    # Of the first text's first piece, one token was generated and nothing follows.
    want = [(4, 0, 4), (8, 0, 4), (16, 0, 4), (24, 0, 4)]
    assert [tuple(map(int, (t[0], p, n))) for t, p, n in zip(*found[:3], strict=True)] == want
    assert slot_is_trained(found).any(axis=1).all()
    whole = pieces(Text(tokens, *ends), 12)
    np.testing.assert_array_equal(whole.tokens, tokens[:3])
    assert [x.tolist() for x in whole[1:3]] == [[3, 4, 0], [12, 9, 6]]


def test_a_step_of_pieces_has_the_tokens_of_a_step():
    options = replace(_options(), batch=2, text_length=4)
    batch = training_batches(_texts(6, 8), options, RUN, tiny.TARGET)
    assert batch(0).tokens.shape == (4, 4)
    epoch = np.concatenate([batch(step).tokens[:, 0] for step in range(3)])
    assert sorted(epoch) == sorted([*range(6)] * 2)
    with pytest.raises(ConfigError, match="does not divide the texts' 8 tokens"):
        training_batches(_texts(6, 8), replace(options, text_length=3), RUN, tiny.TARGET)
    with pytest.raises(ConfigError, match="4 pieces, and a step has 8"):
        training_batches(_texts(2, 8), replace(options, batch=4), RUN, tiny.TARGET)
