"""A model of the device in plain Python.

`FakeDevice` keeps a real KV cache of token ids behind the page tables, and every token it emits is a
function of what it reads there. A page lost, shared, or remapped too early changes the output.
"""

import itertools
import random
import zlib

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.calls import Calls, DecodeCall, PrefillCall
from peagle_jax.engine.request import BatchLogprobs, Request

VOCAB = 60
JUNK = -1  # what rejected drafts, mask rows and padding leave behind in the cache


def true_next(tokens: list[int]) -> int:
    """The law of the fake model: next token as a function of everything before it."""
    return zlib.crc32(bytes(tokens)) % VOCAB


class FakeDevice:
    """Runs plans at dispatch. Per slot [length, last token, num_draft, drafts of the last call]."""

    def __init__(self, config: EngineConfig, rng: random.Random):
        self.config, self.rng = config, rng
        self.kv = np.full((config.total_pages, config.page_size), JUNK)
        self.slots = [[0, 0, 0, []] for _ in range(config.max_num_seqs)]

    def run(self, calls: Calls) -> dict:
        prefill = lambda: [self.prefill(call) for call in calls.prefills]
        decode = lambda: None if calls.decode is None else self.decode(calls.decode)
        parts = [("prefill", prefill), ("decode", decode)]
        self.rng.shuffle(parts)  # prefill and round of one step are independent
        return {name: part() for name, part in parts}

    def rows(self, call: PrefillCall | DecodeCall):
        plan = call.plan
        for row, request in enumerate(call.requests):
            if request is None:
                assert plan.slots[row] == self.config.max_num_seqs
                assert not plan.page_table[row].any()
            else:
                yield row, plan.slots[row], request, plan.page_table[row]

    def write(self, request: Request, pages: np.ndarray, position: int, token: int) -> None:
        if position < self.config.max_model_len:
            page = pages[position // self.config.page_size]
            assert page in request.pages, f"{request.id} writes position {position} to {page}"
            self.kv[page, position % self.config.page_size] = token

    def read(self, pages: np.ndarray, length: int) -> list[int]:
        tokens = self.kv[pages].ravel()[: min(length, self.config.max_model_len)].tolist()
        assert JUNK not in tokens, "a committed position was overwritten"
        return tokens

    def draft(self, tokens: list[int], number: int) -> list[int]:
        """The true continuation of `tokens`, with one mistake at a random place or none."""
        drafts, mistake = [], self.rng.randint(0, number)
        for place in range(number):
            token = true_next(tokens + drafts)
            drafts.append((token + 1) % VOCAB if place == mistake else token)
        return drafts

    def prefill(self, call: PrefillCall):
        plan = call.plan
        tokens = np.full((len(call.requests), 1), JUNK)
        drafts = np.full((len(call.requests), self.config.num_draft), JUNK)
        for row, slot, request, pages in self.rows(call):
            start, end = plan.start[row], plan.start[row] + plan.count[row]
            assert start == 0 or self.slots[slot][0] == start
            for position in range(start, end):
                self.write(request, pages, position, plan.tokens[row, position - start])
            num_draft = plan.params.num_draft[row]
            self.slots[slot] = [end, int(plan.next_token[row]), num_draft, []]
            if call.last[row]:
                for position in range(end, end + self.config.num_draft):  # the drafter's mask rows
                    self.write(request, pages, position, JUNK)
            if plan.next_token[row] >= 0:
                assert plan.next_token[row] == request.tokens[end]
            else:
                tokens[row] = self.slots[slot][1] = true_next(self.read(pages, end))
            if call.last[row]:
                text = [*self.read(pages, end), self.slots[slot][1]]
                drafts[row] = self.slots[slot][3] = self.draft(text, self.config.num_draft)
        return tokens, (tokens[:, 0] != JUNK).astype(int), drafts, fake_logprobs(tokens)

    def decode(self, call: DecodeCall):
        K = self.config.num_draft_at(len(call.requests))
        assert call.num_draft == K
        tokens = np.full((len(call.requests), K + 1), JUNK)
        drafts = np.full((len(call.requests), K), JUNK)
        for row, slot, request, pages in self.rows(call):
            length, last, num_draft, made = self.slots[slot]
            assert call.plan.pending[row] == min(len(made), K), (
                "not the number of drafts that was made"
            )
            assert call.drafted[row] == min(K, num_draft, len(made))
            text = [*self.read(pages, length), last]
            end = length + 1 + num_right(text, made[: call.drafted[row]])
            for position in range(length, end):
                self.write(request, pages, position, last)
                last = tokens[row, position - length] = true_next(self.read(pages, position + 1))
            for position in range(end, length + max(1, 2 * K)):
                self.write(request, pages, position, JUNK)
            drafts[row] = made = self.draft([*self.read(pages, end), last], K)
            self.slots[slot] = [end, last, num_draft, made]
        return tokens, (tokens != JUNK).sum(axis=1), drafts, fake_logprobs(tokens)


def num_right(tokens: list[int], drafts: list[int]) -> int:
    """How many leading drafts are the true continuation of `tokens`."""
    right = (true_next(tokens + drafts[:i]) == draft for i, draft in enumerate(drafts))
    return sum(itertools.takewhile(bool, right))


def fake_logprobs(tokens: np.ndarray) -> BatchLogprobs:
    ids = np.stack([tokens, tokens + 1, tokens + 2], axis=-1)
    return BatchLogprobs(chosen=-tokens / 4, top_ids=ids, top_logprobs=-ids / 4)
