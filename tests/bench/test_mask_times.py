"""`python -m bench.mask_times` on a small vocabulary."""

import inspect

import pytest

from bench import mask_times


@pytest.fixture(scope="module")
def words() -> mask_times.Words:
    return mask_times.Words(900, [inspect.getsource(mask_times)])


def test_the_vocabulary_spells_any_text(words):
    assert 256 < len(words.tokens) <= 900
    text = 'def f(): return "é"'
    ids = words(text)
    assert len(ids) < len(text)
    assert b"".join(words.tokens[i] for i in ids).decode() == text


@pytest.mark.parametrize(("strings", "num_threads"), [("without limit", None), ("maxLength 16", 2)])
def test_masks_are_timed_along_a_text_that_they_allow(words, strings, num_threads):
    row = mask_times.measure(words, strings, size=2, num_draft=3, num_threads=num_threads)
    assert (row["vocab_size"], row["concurrency"], row["num_draft"]) == (len(words.tokens), 2, 3)
    assert 0 < row["masks_ms"] <= row["masks_ms_max"]
    assert row["calls"] > 10
    assert row["threads"] == num_threads
