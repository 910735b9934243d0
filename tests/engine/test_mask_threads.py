"""The number of threads that compute the masks of a call; masks do not depend on it."""

import inspect
import itertools
import re

import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher

from peagle_jax.engine.structured import mask_threads
from peagle_jax.engine.structured.grammar import Matcher, definition, masks_of, new_matcher
from peagle_jax.engine.structured.mask_threads import MaskThreads
from peagle_jax.method.plan import mask_words
from peagle_jax.structured import Structured

DEFINITION = definition(Structured.json_schema({"type": "string", "maxLength": 9}), None, {})
SIZE = 5


class Words:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it: the bytes, and the words of a text."""

    def __init__(self, text: str):
        words = sorted({word.encode() for word in re.findall(r" ?[A-Za-z]+", text)})
        self.tokens = [
            *(bytes([i]) for i in range(256)),
            *(w for w in words if len(w) > 1),
            b"<end>",
        ]
        self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None
        self.special_token_ids = [self.eos_token_id]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self.vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: str | bytes) -> list[int]:
        data, ids = text.encode() if isinstance(text, str) else text, []
        while data:
            size = next(n for n in range(len(data), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(inspect.getsource(mask_threads))


def compiled(words: Words) -> LLMatcher:
    return new_matcher(words.vocabulary, DEFINITION)


@pytest.mark.parametrize(
    ("milliseconds", "num_requests", "count"),
    [
        (0.0, 64, 1),
        (0.1, 8, 1),
        (0.1, 32, 4),
        (9.0, 1, 1),
        (1.1, 2, 4),
        (3.0, 8, 32),
        (3.0, 256, 48),
    ],
)
def test_a_thread_is_woken_for_each_millisecond_of_masks(milliseconds, num_requests, count):
    threads = MaskThreads(48)
    threads.seconds_each = milliseconds / 1e3
    assert threads.count(num_requests) == count


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_masks_do_not_depend_on_the_number_of_threads(words, monkeypatch, seconds):
    monkeypatch.setattr(mask_threads, "_SAMPLED_EVERY", 2)
    threads, width = MaskThreads(3), mask_words(len(words.tokens))
    text = words('"num_cores"')
    matchers = [Matcher(compiled(words), threads, {words.eos_token_id}, width) for _ in range(SIZE)]
    for call in range(2 * SIZE):
        threads.seconds_each = seconds
        assert threads.count(SIZE) == (3 if seconds else 1)
        rows = [(one, text[:row]) for row, one in enumerate(matchers)]
        masks = masks_of(rows, size=SIZE, height=SIZE)
        for row in range(SIZE):
            for place in range(row + 1):
                alone = compiled(words)
                alone.consume_tokens(text[:place])
                assert masks[row, place].tobytes() == alone.compute_bitmask(), (call, row, place)


def test_the_estimate_follows_masks_that_became_cheap_or_costly(words, monkeypatch):
    """The clocks are counters: a call with one thread takes as long as `cost` says, and so does a sample."""
    cost, now = 0.004, itertools.count()
    monkeypatch.setattr(mask_threads.time, "perf_counter", lambda: next(now) * cost * SIZE)
    monkeypatch.setattr(mask_threads.time, "thread_time", lambda: next(now) * cost)
    threads, masks = MaskThreads(32), np.zeros((2 * SIZE, mask_words(len(words.tokens))), np.int32)
    windows = [(compiled(words), 2 * row, words("x")) for row in range(SIZE)]
    counts = []
    for call in range(200):
        cost = 0.004 if call < 20 else 0.0001
        counts.append(threads.count(SIZE))
        threads.fill(windows, masks)
    assert counts[:2] == [1, 32], "costly masks take several threads from the next call on"
    assert counts[19] == 32
    assert counts[-1] == 1, "cheap ones take one thread again"
    assert threads.seconds_each == pytest.approx(0.0001)
