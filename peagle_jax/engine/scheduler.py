"""Continuous batching: which requests the next device calls serve, and on which pages.

The engine dispatches round n before it commits round n-1, so `schedule` runs while the results of the
previous calls are unknown. Device state carries lengths, last tokens and drafts from call to call; the
host only bounds them, and reserves pages for the bound:

    |-- committed: KV final --|-- (J+1) per round in flight --|-- lookahead of this round --|
    0                         known                           upper bound                   reserved

all of it capped at max_model_len (the device drops writes past that). `commit_*` learns the truth and
gives the surplus back. Pages and slots change hands at once, even below a call that still runs:
device calls are ordered, so a stale write always comes before the new owner's first one.
"""

import itertools
from collections import deque
from collections.abc import Collection

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.pages import PagePool
from peagle_jax.engine.plan import DecodePlan, Plan, PrefillPlan
from peagle_jax.engine.request import NOT_FINITE, BatchLogprobs, Request, RequestState
from peagle_jax.engine.stats import Acceptance

MAX_IN_FLIGHT = 2  # the round being dispatched, and the one before it

Update = tuple[Request, list[int]]
"""A request and the tokens a commit added to its output, for streaming."""


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; the caller should retry later."""


class Scheduler:
    """Owns the waiting queue, the slots and the page pool.

    Args:
      config: sizes of the engine.
      eos_ids: the target's end-of-sequence ids.
    """

    def __init__(self, config: EngineConfig, *, eos_ids: Collection[int]):
        self.config = config
        self.eos_ids = frozenset(eos_ids)
        self.pool = PagePool(config.total_pages, config.page_size)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # PREFILL and RUNNING, in order of admission
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.num_not_finite = 0
        """Requests that ended because their logits were not finite."""
        self.batch_sizes = config.batch_buckets
        """What a round may be padded to, ascending; the last is `max_num_seqs`."""
        self._drafted = self._emitted = 0
        self._rounds_by_accepted = [0] * (config.num_draft + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot, prefilling ones included."""
        return len(self.active)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def acceptance(self) -> Acceptance:
        """Over all rounds so far that had drafts, requests that still run included."""
        rounds = self._rounds_by_accepted
        reached = tuple(sum(rounds[i + 1 :]) for i in range(self.config.num_draft))
        return Acceptance(sum(rounds), self._emitted, self._drafted, sum(reached), reached)

    def add(self, request: Request) -> None:
        """Queues a request that passes `rules.check_request`: `QueueFull` at the queue's bound."""
        if request.state is not RequestState.WAITING or request.output:
            raise ValueError(f"request {request.id} was added before; make a new Request")
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; retry later")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request in any state and frees what it holds; a finished one is left as it is."""
        if not request.is_finished:
            request.finish("abort")
            self._remove(request)

    def schedule(self) -> Plan:
        """Plans the next calls and books them as dispatched: the engine must run what it returns.

        Decoding comes first: it may preempt, and then nothing is admitted. A request whose last chunk is
        planned here decodes from the next plan on.
        """
        preemptions_before = self.num_preemptions
        decode = self._plan_decode()
        may_admit = self.num_preemptions == preemptions_before
        calls = (self._plan_prefill(may_admit) for _ in range(self.config.prefill_calls))
        prefills = tuple(itertools.takewhile(lambda call: call is not None, calls))
        return Plan(prefills=prefills, decode=decode)

    def commit_prefill(
        self,
        plan: PrefillPlan,
        tokens: np.ndarray,  # [R, 1]
        count: np.ndarray,  # [R], 1 where the row ended its prompt, -1 where its logits are not finite
        logprobs: BatchLogprobs | None = None,  # C = 1
    ) -> list[Update]:
        """Takes in the first tokens of the prompts that this call completed."""
        updates = []
        for row, request in enumerate(plan.requests):
            if not plan.samples(row):
                continue
            request.in_flight -= 1
            request.prefill_in_flight = False
            if not request.is_finished:
                updates.append(self._receive(request, row, tokens, int(count[row]), logprobs))
        return updates

    def commit_decode(
        self,
        plan: DecodePlan,
        tokens: np.ndarray,  # [B, J+1]
        count: np.ndarray,  # [B], accepted drafts + 1; -1 - n where only n tokens have finite logits
        logprobs: BatchLogprobs | None = None,  # C = J+1
    ) -> list[Update]:
        """Takes in one round: appends its tokens, counts its drafts, frees what is no longer needed."""
        updates = []
        for row, request in enumerate(plan.requests):
            if request is None:
                continue
            request.in_flight -= 1
            if not request.is_finished:
                produced = int(count[row])
                update = self._receive(request, row, tokens, produced, logprobs)
                # Of a round that failed, all tokens are drafts: the target's own is not there.
                survivors = produced - 1 if produced > 0 else -1 - produced
                self._record_round(request, survivors, len(update[1]))
                updates.append(update)
        return updates

    def check_integrity(self) -> None:
        """Raises `AssertionError` on a leak, a double owner or an impossible request."""
        self.pool.check_integrity(request.pages for request in self.active)
        slots = [request.slot for request in self.active] + self.free_slots
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise AssertionError(f"slots are shared or lost: {slots}")
        for request in self.waiting:
            assert request.state is RequestState.WAITING, f"{request.id} waits as {request.state}"
            assert request.slot is None, f"{request.id} waits and holds a slot"
            assert not request.pages, f"{request.id} waits and holds pages"
            assert request.num_prefilled == 0, f"{request.id} waits and is prefilled"
        for request in self.active:
            is_running = request.state is RequestState.RUNNING
            assert is_running or request.state is RequestState.PREFILL, (
                f"{request.id} {request.state}"
            )
            assert is_running or request.in_flight == 0, f"{request.id} decodes before its prefill"
            held = len(request.pages) * self.pool.page_size
            assert request.committed <= held, f"{request.id} has KV outside of its pages"
            assert len(request.pages) <= self.config.pages_per_seq, f"{request.id} holds too much"
        for request in [*self.waiting, *self.active]:
            assert request.prefill_in_flight <= request.in_flight <= MAX_IN_FLIGHT, request.id
            assert len(request.output) < request.params.max_tokens, f"{request.id} is complete"
            assert request.num_tokens < self.config.max_model_len, f"{request.id} is complete"

    def _plan_decode(self) -> DecodePlan | None:
        rows = []
        for request in list(self.active):
            # The snapshot may hold requests that an older one has just preempted: they are WAITING.
            if request.state is not RequestState.RUNNING or self._is_ending(request):
                continue
            if self._reserve(request):
                rows.append(request)
        if not rows:
            return None
        for request in rows:
            request.in_flight += 1
        size = next(size for size in self.batch_sizes if size >= len(rows))
        return DecodePlan.build(rows, size, self.config)

    def _plan_prefill(self, may_admit: bool) -> PrefillPlan | None:
        size = self.config.prefill_rows
        rows = [request for request in self.active if request.state is RequestState.PREFILL][:size]
        while may_admit and len(rows) < size and self._admit_next():
            rows.append(self.active[-1])
        if not rows:
            return None
        plan = PrefillPlan.build(rows, self.config)
        for row, request in enumerate(rows):
            request.num_prefilled += int(plan.count[row])
            if plan.last[row]:
                request.state = RequestState.RUNNING
                request.prefill_in_flight = plan.samples(row)
                request.in_flight += request.prefill_in_flight
        return plan

    def _record_round(self, request: Request, survivors: int, kept: int) -> None:
        """Counts a round in which `survivors` drafts passed the target and `kept` tokens became output.

        A text may end on a draft: the drafts after it passed the target and are no output.
        """
        accepted = min(survivors, kept)
        request.record_round(accepted)
        if request.num_draft:
            self._emitted += kept
            self._drafted += request.num_draft
            self._rounds_by_accepted[accepted] += 1

    def _is_ending(self, request: Request) -> bool:
        """Whether the calls in flight, one token each at the least, already end the request."""
        output = len(request.output) + request.in_flight
        total = request.num_tokens + request.in_flight
        return output >= request.params.max_tokens or total >= self.config.max_model_len

    def _num_pages(self, positions: int) -> int:
        """Pages for `positions` and the lookahead of a round that starts there."""
        reserved = min(positions + self.config.lookahead, self.config.max_model_len)
        return self.pool.pages_for(reserved)

    def _num_pages_running(self, request: Request) -> int:
        upper = request.committed + request.rounds_in_flight * (self.config.num_draft + 1)
        return self._num_pages(upper)

    def _reserve(self, request: Request) -> bool:
        """Gives `request` the pages of one more round, at the expense of younger ones.

        Returns False when the request itself was the youngest and had to go. The oldest request always
        succeeds, since the pool holds at least one longest request.
        """
        missing = max(0, self._num_pages_running(request) - len(request.pages))
        while missing > self.pool.num_free:
            victim = self.active[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        """Sends a request to the head of the queue; its tokens so far are prefilled when it returns.

        Results still in flight stay valid: they are appended at commit, before it may come back.
        """
        self._remove(request)
        request.state = RequestState.WAITING
        request.num_prefilled = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit_next(self) -> bool:
        """Gives the head of the queue a slot and pages, if both are there; nobody overtakes it."""
        if not self.waiting or not self.free_slots:
            return False
        request = self.waiting[0]
        num_pages = self._num_pages(request.num_tokens)
        # With results in flight its tokens are not all known, so there is nothing yet to prefill.
        if request.in_flight or num_pages > self.pool.num_free:
            return False
        self.waiting.popleft()
        request.slot = self.free_slots.pop()
        request.pages = self.pool.allocate(num_pages)
        request.state = RequestState.PREFILL
        self.active.append(request)
        return True

    def _remove(self, request: Request) -> None:
        """Takes a request out of wherever it is, and back what it holds."""
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.active.remove(request)
        self.free_slots.append(request.slot)
        self.pool.release(request.pages)
        request.slot = None
        request.pages = []

    def _receive(
        self,
        request: Request,
        row: int,
        tokens: np.ndarray,  # [B, C]
        count: int,
        logprobs: BatchLogprobs | None,
    ) -> Update:
        """Appends a row's tokens, then frees the request or the pages it did not need.

        A negative count is -1 - n: the logits behind n tokens are not finite, and the request fails unless
        one of these tokens ends its text.
        """
        assert count, f"a call produced no token for request {request.id}"
        is_finite = count > 0
        count = count if is_finite else -1 - count
        num_top = request.params.logprobs
        wanted = None
        if logprobs is not None and num_top is not None:
            wanted = logprobs.row(row, count, num_top)
        kept = request.append(
            tokens[row, :count].tolist(),
            eos_ids=self.eos_ids,
            max_model_len=self.config.max_model_len,
            logprobs=wanted,
        )
        if not (is_finite or request.is_finished):
            self.num_not_finite += 1
            request.fail(NOT_FINITE)
        if request.is_finished:
            self._remove(request)
        elif request.state is RequestState.RUNNING:
            needed = self._num_pages_running(request)
            self.pool.release(request.pages[needed:])
            del request.pages[needed:]
        return request, kept
