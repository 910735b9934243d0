"""A model of the device in plain Python.

`FakeDevice` keeps the caches of target and drafter as token ids behind the page tables, and rings
for layers with sliding windows. Every token it emits is a function of what it reads there. A page
lost, shared, or remapped too early changes the output.
"""

import itertools
import random
import zlib
from collections.abc import Collection, Iterable

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import Calls, DecodeCall, PrefillCall
from peagle_jax.engine.host.pages import PagePool
from peagle_jax.engine.host.request import BatchLogprobs, Request, RingCopy
from peagle_jax.models.cache import ring_rows

VOCAB = 60
JUNK = -1  # what rejected drafts, mask rows and padding leave behind in the caches


def true_next(tokens: list[int]) -> int:
    """The law of the fake model: next token as a function of everything before it."""
    return zlib.crc32(bytes(tokens)) % VOCAB


class Row:
    """One real row of a call: the caches of target and drafter as its request sees them.

    Position p of the target's cache holds x_p, position p of the drafter's x_{p+1}.
    """

    def __init__(self, device: "FakeDevice", request: Request, slot: int, pages: np.ndarray):
        self.device, self.request, self.slot, self.pages = device, request, slot, pages
        self.size = device.config.page_size

    def write(self, position: int, token: int, following: int) -> None:
        """Writes x_p and x_{p+1} to the caches, or junk."""
        for window, ring in self.device.rings.items():
            ring[self.slot, position % self.device.capacity(window)] = token, following
        if position >= self.device.config.max_model_len:
            return
        page = self.pages[position // self.size]
        if token == JUNK and not page:  # padding beyond the pages of the request
            return
        name = self.request.id
        assert page in self.request.pages, f"{name} writes position {position} to {page}"
        assert position >= self.device.first[self.slot], f"{name} writes to what it found"
        if page in self.device.found:
            number = self.device.pool.numbers.get(page)
            assert self.device.found.pop(page) != number, f"{name} writes to what others found"
        self.device.kv[page, position % self.size] = token, following

    def read(self, length: int) -> list[int]:
        """Tokens 0 .. length-1 as the row at position length-1 sees them."""
        length = min(length, self.device.config.max_model_len)
        tokens = self.device.kv[self.pages].reshape(-1, 2)[:length, 0].tolist()
        assert JUNK not in tokens, "a committed position was overwritten"
        for window, ring in self.device.rings.items():
            visible = range(max(0, length - window), length)
            found = [ring[self.slot, p % self.device.capacity(window), 0] for p in visible]
            assert found == tokens[visible.start :], "a window was overwritten"
        return tokens

    def check(self, tokens: list[int], length: int) -> None:
        """Positions 0 .. length-1 hold `tokens`, of the drafter the tokens after them."""
        length = min(length, self.device.config.max_model_len)
        assert self.read(length) == tokens[:length], "keys of other tokens"
        drafters = self.device.kv[self.pages].reshape(-1, 2)[:length, 1].tolist()
        assert drafters == tokens[1 : length + 1], "the drafter's keys are of other tokens"
        for window, ring in self.device.rings.items():
            visible = range(max(0, length - window), length)
            found = [ring[self.slot, p % self.device.capacity(window), 1] for p in visible]
            assert found == drafters[visible.start :], "a window of the drafter was overwritten"


class FakeDevice:
    """Runs plans at dispatch. Per slot [length, last token, num_draft, drafts of the last call].

    Args:
      config: sizes of the engine.
      pool: the scheduler's.
      rng: decides how many drafts are accepted, and the order of independent calls.
      windows: sizes of sliding windows, in layers of the target and of the drafter.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        rng: random.Random,
        windows: Collection[int] = (),
    ):
        self.config, self.pool, self.rng = config, pool, rng
        self.kv = np.full((config.total_pages, config.page_size, 2), JUNK)
        self.slots = [[0, 0, 0, []] for _ in range(config.max_num_seqs)]
        self.first = [0] * config.max_num_seqs
        """Per slot the first position that its request wrote: the length of its hit."""
        self.found: dict[int, int] = {}
        """Pages that a request found, with their numbers: no call writes to them while they are
        known.
        """
        self.num_found = 0
        self.owners: list = [None] * config.max_num_seqs
        self.rings = {
            window: np.full((ring_rows(config), self.capacity(window), 2), JUNK)
            for window in windows
        }

    def capacity(self, window: int) -> int:
        return self.config.ring_pages(window) * self.config.page_size

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
                slot = plan.slots[row]
                yield row, slot, Row(self, request, slot, plan.page_table[row])

    def copy_rings(self, copies: Iterable[RingCopy]) -> None:
        for source, target in copies:
            assert min(source, target) < self.config.max_num_seqs < max(source, target)
            for ring in self.rings.values():
                ring[target] = ring[source]

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
        starts = {}
        self.copy_rings(call.restores)
        for row, slot, view in self.rows(call):  # all rows of a call read what was there before it
            start, request = int(plan.start[row]), view.request
            if self.owners[slot] != (request, request.preemptions):
                self.owners[slot] = request, request.preemptions
                self.first[slot] = self.slots[slot][0] = start
                self.num_found += start
                hit = start // self.config.page_size
                self.found |= dict(zip(view.pages[:hit].tolist(), request.chain, strict=False))
            assert self.slots[slot][0] == start
            view.check(request.tokens, start)
            starts[row] = start
        for row, slot, view in self.rows(call):
            start, end = starts[row], starts[row] + int(plan.count[row])
            assert end > start, "a row without tokens"
            following = [*plan.tokens[row, 1 : end - start].tolist(), int(plan.next_token[row])]
            for position in range(start, end):
                token = int(plan.tokens[row, position - start])
                view.write(position, token, following[position - start])
            # Padding rows, and those that the drafter adds.
            for position in range(end, start + self.config.prefill_chunk + self.config.num_draft):
                view.write(position, JUNK, JUNK)
            num_draft = plan.params.num_draft[row]
            self.slots[slot] = [end, int(plan.next_token[row]), num_draft, []]
            if plan.next_token[row] >= 0:
                assert plan.next_token[row] == view.request.tokens[end]
            else:
                allowed = mask_of(call, row, 0)
                tokens[row] = self.slots[slot][1] = allowed_next(view.read(end), allowed)
                view.write(end - 1, view.request.tokens[end - 1], int(tokens[row, 0]))
            if call.last[row]:
                text = [*view.read(end), self.slots[slot][1]]
                drafts[row] = self.slots[slot][3] = self.draft(text, self.config.num_draft)
        self.copy_rings(call.saves)
        return tokens, (tokens[:, 0] != JUNK).astype(int), drafts, fake_logprobs(tokens)

    def decode(self, call: DecodeCall):
        K = call.num_draft
        tokens = np.full((len(call.requests), K + 1), JUNK)
        drafts = np.full((len(call.requests), K), JUNK)
        for row, slot, view in self.rows(call):
            length, last, num_draft, made = self.slots[slot]
            assert call.plan.pending[row] == min(len(made), K), (
                "not the number of drafts that was made"
            )
            assert call.drafted[row] == min(K, num_draft, len(made))
            text = [*view.read(length), last]
            view.check(text, length)
            forced = call.plan.forced[row]
            assert call.plan.constrained[row] or (forced == -1).all()
            made = [
                mine if mine >= 0 else own for own, mine in zip(made, forced.tolist(), strict=False)
            ]
            right = (
                allowed_next(text + made[:i], mask_of(call, row, i)) == made[i]
                for i in range(call.drafted[row])
            )
            end = length + 1 + sum(itertools.takewhile(bool, right))
            for position in range(length, end):
                view.write(position, last, JUNK)
                allowed = mask_of(call, row, position - length)
                following = allowed_next(view.read(position + 1), allowed)
                view.write(position, last, following)
                last = tokens[row, position - length] = following
            for position in range(end, length + max(1, 2 * K)):
                view.write(position, JUNK, JUNK)
            drafts[row] = made = self.draft([*view.read(end), last], K)
            self.slots[slot] = [end, last, num_draft, made]
        return tokens, (tokens != JUNK).sum(axis=1), drafts, fake_logprobs(tokens)


def mask_of(call: PrefillCall | DecodeCall, row: int, place: int) -> np.ndarray | None:
    """[VOCAB] bool: tokens that the call allows after `place` drafts; None: all."""
    if not call.plan.constrained[row]:
        return None
    bits = np.unpackbits(call.mask[row, place].view(np.uint8), bitorder="little")
    return bits[:VOCAB].astype(bool)


def allowed_next(tokens: list[int], allowed: np.ndarray | None) -> int:
    """The law of the fake model under a mask: the first allowed token from `true_next` on."""
    token = true_next(tokens)
    return token if allowed is None else (token + int(np.argmax(np.roll(allowed, -token)))) % VOCAB


def fake_logprobs(tokens: np.ndarray) -> BatchLogprobs:
    ids = np.stack([tokens, tokens + 1, tokens + 2], axis=-1)
    return BatchLogprobs(chosen=-tokens / 4, top_ids=ids, top_logprobs=-ids / 4)
