"""Continuous batching: admission, page reservation, preemption, and commit of results. No jax here.

The engine dispatches round n before it commits round n-1. So `schedule` runs before the results of
the previous calls are on the host. Lengths, last tokens and drafts stay in device state; the host
keeps an upper bound of each length and reserves pages up to it (`reservation`). `commit_*` receives
the real lengths. Freed pages and slots can be reused at once, even while a call still writes to
them: device calls run in order, so the stale write comes before the first write of the new owner.
"""

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import Calls, DecodeCall, PrefillCall, RoundShape
from peagle_jax.engine.host.controls import controls_of
from peagle_jax.engine.host.integrity import check_requests
from peagle_jax.engine.host.k_by_load import LoadPolicy
from peagle_jax.engine.host.mask_turns import MaskTurns
from peagle_jax.engine.host.pages import PagePool
from peagle_jax.engine.host.prefill_shapes import PrefillShape, prefill_shapes
from peagle_jax.engine.host.prefixes import PrefixCache
from peagle_jax.engine.host.request import NOT_FINITE, BatchLogprobs, Request, RequestState
from peagle_jax.engine.host.reservation import Reservation
from peagle_jax.engine.host.stats import Acceptance, RoundCounter

Update = tuple[Request, list[int]]
"""A request and the tokens a commit added to its output, for streaming."""


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; the caller should retry later."""


class Scheduler:
    """Owns the waiting queue, the slots and the page pool.

    Args:
      config: sizes of the engine.
      eos_ids: the target's end-of-sequence ids.
      windows: sizes of the sliding windows in the layers of target and drafter.
      policy: chooses K of each round; None: K is J.
    """

    idle_prefills = 4
    """Prefill calls of a step while no request decodes."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_ids: Collection[int],
        windows: Collection[int] = (),
        policy: LoadPolicy | None = None,
    ):
        self.config = config
        self.policy = policy
        self.eos_ids = frozenset(eos_ids)
        self.pool = PagePool(config.total_pages, config.page_size)
        self._pages = Reservation(config, self.pool)
        self.waiting: list[Request] = []  # by rank
        self.active: list[Request] = []  # PREFILL and RUNNING, by rank
        self.prefixes = PrefixCache(config, self.pool, windows)
        self.free_slots = self.prefixes.free_slots
        self.num_not_finite = 0
        """Requests that ended because their logits were not finite."""
        self.is_draining = False
        """Whether only requests that have begun are admitted."""
        self.counts = RoundCounter(config)
        self.repeated: Collection[RoundShape] = ()
        """Shapes of which one call can run several rounds. It is replaced as a whole, by any
        thread."""
        self._last_decode: tuple[DecodeCall | None, object] = None, None
        """The last round, and `num_changes` of the reservation at that time."""
        self._mask_turns = MaskTurns()
        self._numbers = itertools.count()
        self.num_preemptions = 0
        self._refused: tuple[Request, int] | None = None
        """The head of the queue that did not fit, and `num_changes` of the pool at that time."""
        self.rounds: Mapping[int, Sequence[int]] = dict.fromkeys(
            config.batch_buckets, (config.num_draft,)
        )
        """Rounds that may run: values of K by batch bucket (the size to which a round is padded),
        both ascending; the last bucket is `max_num_seqs`. It is replaced as a whole, by any
        thread."""
        self.prefills: Sequence[PrefillShape] = prefill_shapes(config)
        """Shapes of prefill calls that may run, as `rounds`."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def acceptance(self) -> Acceptance:
        """Counts over all committed rounds with drafts."""
        return self.counts.acceptance

    @property
    def num_running(self) -> int:
        """Number of requests that hold a slot, including those in prefill."""
        return len(self.active)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def num_draft_at(self, size: int) -> int:
        """K of the next rounds of the batch bucket `size`."""
        return self.config.num_draft if self.policy is None else self.policy.present(size)

    @property
    def num_places(self) -> int:
        """Requests that `add` takes at most: free slots, and free places of the queue."""
        free = self.config.max_num_seqs - len(self.active)
        return max(0, self.config.max_waiting + free - len(self.waiting))

    def add(self, request: Request) -> None:
        """Queues a request that passed `rules.check_request`; raises `QueueFull` without a place
        for it."""
        if request.state is not RequestState.WAITING or request.output:
            raise ValueError(f"request {request.id} was added before; make a new Request")
        if not self.num_places:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; retry later")
        request.number = next(self._numbers)
        _insert(self.waiting, request)

    def abort(self, request: Request) -> None:
        """Ends a request in any state and frees its slot and pages. No effect on a finished
        request."""
        if not request.is_finished:
            request.finish("abort")
            self._remove(request)

    def start_over(self) -> None:
        """Preempts all requests and forgets all cached pages, whose contents are lost or of other
        weights."""
        while self.active:
            self._preempt(self.active[-1])
        self.pool.flush()

    def schedule(self) -> Calls:
        """Plans the next device calls and counts them as in flight: the caller must dispatch them.

        Decode rows are planned first. If that preempts a request, this step admits none. A request
        whose last prefill chunk is in this step decodes from the next step on.
        """
        preemptions_before, most_calls = self.num_preemptions, self._most_prefills()
        decode = self._plan_decode()
        may_admit = self.num_preemptions == preemptions_before
        prefills: list[PrefillCall] = []
        while len(prefills) < most_calls and (call := self._plan_prefill(may_admit)) is not None:
            prefills.append(call)
            if self._is_long(call):
                break
        return Calls(prefills=tuple(prefills), decode=decode)

    def _is_long(self, call: PrefillCall) -> bool:
        """Whether it is the last of its step: it has the tokens of several, for which new requests
        wait."""
        return call.shape.chunk > self.config.prefill_chunk

    def commit_prefill(
        self,
        call: PrefillCall,
        tokens: np.ndarray,  # [R, 1]
        # [R], 1 where the row ended its prompt, -1 where its logits are not finite
        count: np.ndarray,
        drafts: np.ndarray,  # [R, J]
        logprobs: BatchLogprobs | None = None,  # C = 1
    ) -> list[Update]:
        """Commits one prefill call: appends the first token of each prompt that the call
        completed."""
        updates = []
        for row, is_last in enumerate(call.last):
            request = call.requests[row]
            if is_last:
                request.unread_drafts -= 1
                request.drafts = drafts[row].tolist()
            if not call.samples(row):
                continue
            request.in_flight -= 1
            request.prefill_in_flight = False
            if not request.is_finished:
                updates.append(
                    self._receive(request, row, tokens[row].tolist(), int(count[row]), logprobs)
                )
        return updates

    def commit_decode(
        self,
        call: DecodeCall,
        tokens: np.ndarray,  # [B, K+1]
        # [B], accepted drafts + 1; -1 - n where only n tokens have finite logits
        count: np.ndarray,
        drafts: np.ndarray,  # [B, K], for the next round
        logprobs: BatchLogprobs | None = None,  # C = K+1
    ) -> list[Update]:
        """Commits one round: appends its tokens, counts its drafts. Surplus pages are freed
        if few are left, see `Reservation.trim`."""
        updates, counts = [], []
        tokens, count, drafts = tokens.tolist(), count.tolist(), drafts.tolist()
        for row, request in enumerate(call.rows):
            request.in_flight -= 1
            request.unread_drafts -= 1
            before, request.drafts = request.drafts, drafts[row]
            if not request.is_finished:
                update = self._receive(request, row, tokens[row], count[row], logprobs)
                drafted, produced = call.drafted[row], count[row]
                accepted = self._count(request, before, drafted, produced, len(update[1]))
                counts.append((request, drafted, accepted))
                updates.append(update)
        if self.policy is not None:
            self.policy.record(counts)
        return updates

    def commit_rounds(
        self,
        call: DecodeCall,
        tokens: np.ndarray,  # [repeat, B, K+1]
        count: np.ndarray,  # [repeat, B], as of `commit_decode`
        drafts: np.ndarray,  # [repeat, B, K], of each round for the next
    ) -> Iterator[Update]:
        """Commits the `repeat` rounds of one call, all of one request before the next one.

        Yields:
          An update for each round of each request; `request.last_round` is that round while the
          caller has it.
        """
        verified = [call.drafted, *[call.drafted_again] * (call.repeat - 1)]
        counts = []
        # By request, then by round.
        by_row = (values.swapaxes(0, 1).tolist() for values in (tokens, count, drafts))
        for row, (request, *results) in enumerate(zip(call.rows, *by_row, strict=False)):
            request.in_flight -= call.repeat
            request.unread_drafts -= call.repeat
            takes_all = self._takes_all(request, *results[:2])
            for index, (new, produced, following) in enumerate(zip(*results, strict=True)):
                before, request.drafts = request.drafts, following
                if request.is_finished:  # by the round before, or by the caller
                    continue
                if takes_all:
                    update = request, new[:produced]
                    request.output += update[1]
                else:
                    update = self._receive(request, row, new, produced, None)
                drafted = verified[index][row]
                accepted = self._count(request, before, drafted, produced, len(update[1]))
                counts.append((request, drafted, accepted))
                yield update
            if takes_all and not request.is_finished:
                self._kept(request)
        if self.policy is not None:
            self.policy.record(counts)

    def check_integrity(self) -> None:
        """Raises `AssertionError` on a leak, a double owner or an impossible request."""
        self.pool.check_integrity(request.pages for request in self.active)
        slots = [*(request.slot for request in self.active), *self.free_slots]
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise AssertionError(f"slots are shared or lost: {slots}")
        check_requests(self.waiting, self.active, self.config)

    def _plan_decode(self) -> DecodeCall | None:
        rows = []
        for request in self._decodable():
            # Skip requests of this snapshot that `_reserve` has just preempted: they are WAITING.
            if request.state is RequestState.RUNNING and self._reserve(request):
                rows.append(request)
        if not rows:
            return None
        call = self._build_decode(rows)
        for request in rows:
            request.in_flight += call.repeat
            request.unread_drafts += call.repeat
            request.pending = call.num_draft
        return call

    def _decodable(self) -> list[Request]:
        """The requests of the next round, if there are pages for them."""
        holds = self._holds_constrained()
        rows = [
            request
            for request in self.active
            if request.state is RequestState.RUNNING and not self._is_ending(request)
            if request.matcher is None or not (holds or request.unread_drafts)
        ]
        constrained = [request for request in rows if request.matcher is not None]
        if not constrained:
            return rows
        has_others = len(constrained) < len(rows)
        chosen = self._mask_turns.choose(
            constrained, num_draft=self.config.num_draft, has_others=has_others
        )
        return [request for request in rows if request.matcher is None or request in chosen]

    def _build_decode(self, rows: list[Request]) -> DecodeCall:
        """A round for `rows`: the last one again, if it is the same, so that no plan is packed or
        uploaded."""
        shape, changes = self._shape(rows), self._pages.num_changes
        repeat = self.config.repeat if shape in self.repeated else 1
        call, planned = self._last_decode
        if call is None or planned != (changes, repeat) or not call.is_again(rows, shape):
            call = DecodeCall.build(rows, shape, self.config, repeat)
            self._last_decode = call, (changes, repeat)
        return call

    def _shape(self, rows: Sequence[Request]) -> RoundShape:
        size, drafts = next(item for item in self.rounds.items() if item[0] >= len(rows))
        num_draft = drafts[-1]
        if self.policy is not None:
            num_draft = self.policy.choose(size, rows, drafts)
        return RoundShape(size, num_draft)

    def _holds_constrained(self) -> bool:
        """Whether constrained requests wait in this step, because a round of one of them is in
        flight.

        Masks need the text and the drafts of the calls before, so a constrained request has at most
        one call in flight. All go in the same round: each would otherwise have its own steps, in
        smaller batches.
        """
        return any(r.matcher is not None and r.rounds_in_flight for r in self.active)

    def _most_prefills(self) -> int:
        """One while a request decodes, also if its next round is not due in this step."""
        return 1 if self._decodes() else self.idle_prefills

    def _decodes(self) -> bool:
        """Whether a request waits for its next round."""
        return any(r.state is RequestState.RUNNING and not self._is_ending(r) for r in self.active)

    def _plan_prefill(self, may_admit: bool) -> PrefillCall | None:
        size = self.config.prefill_rows
        rows = self._in_prefill(size, may_admit)
        while may_admit and self._comes_before(rows[size - 1 :]) and self._admit_next():
            rows = self._in_prefill(size, may_admit)  # in order of rank
        if not rows:
            return None
        new = (request for request in rows if not request.begun)
        controls = (controls_of(request, self.config, self.eos_ids) for request in new)
        restores = self.prefixes.restores(self.active)
        controls = tuple(filter(None, controls))
        may_be_long = not self._decodes()
        call = PrefillCall.build(rows, self.config, controls, restores, self.prefills, may_be_long)
        saves = []
        for row, request in enumerate(rows):
            # Padding rows and drafts are written too.
            request.writes_below(request.num_prefilled + call.shape.chunk + self.config.lookahead)
            request.num_prefilled += int(call.plan.count[row])
            request.begun = True
            # Not before the call is built: rows of one call cannot read each other's pages.
            self.prefixes.publish(request, request.num_prefilled)
            saves += self.prefixes.saves(request, int(call.plan.start[row]))
            if call.last[row]:
                request.state = RequestState.RUNNING
                request.pending = self.config.num_draft
                request.unread_drafts += 1
                request.prefill_in_flight = call.samples(row)
                request.in_flight += request.prefill_in_flight
        return replace(call, saves=tuple(saves))

    def _in_prefill(self, size: int, may_admit: bool) -> list[Request]:
        """The first requests in prefill that have pages, or get them now."""
        proceeds = lambda request: (
            may_admit and self.prefixes.proceed(request, self._pages.num_pages(request.num_tokens))
        )
        candidates = (request for request in self.active if request.state is RequestState.PREFILL)
        return list(
            itertools.islice(
                (request for request in candidates if request.pages or proceeds(request)), size
            )
        )

    def _comes_before(self, rows: list[Request]) -> bool:
        """Whether the head of the queue comes before the only one of `rows`, if there is one."""
        head = self._head
        return head is not None and (not rows or head.rank < rows[0].rank)

    def _is_ending(self, request: Request) -> bool:
        """Whether the calls in flight end the request even if each yields only one token."""
        output, total = (n + request.in_flight for n in (len(request.output), request.num_tokens))
        return output >= request.params.max_tokens or total >= self.config.max_model_len

    def _reserve(self, request: Request) -> bool:
        """Allocates the pages of one more round, preempting the last requests by rank if the pool
        is short.

        Returns False if `request` itself was the last and is preempted. The first request always
        succeeds, because the pool holds at least one request of `max_model_len` tokens.
        """
        missing = self._pages.missing(request)
        while missing > self.pool.num_free:
            victim = self.active[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._pages.grow(request, missing, self._is_awaited)
        return True

    def _preempt(self, request: Request) -> None:
        """Moves a request back to the queue. On readmission prefill recomputes its KV.

        Its results in flight stay valid: commit appends them before the request can be readmitted.
        """
        has_begun = bool(request.pages)  # false while it waits for another request's pages
        self._remove(request)
        request.state = RequestState.WAITING
        request.num_prefilled = 0
        request.preemptions += has_begun
        self.num_preemptions += has_begun
        _insert(self.waiting, request)

    def _admit_next(self) -> bool:
        """Admits the head of the queue if a slot and enough pages are free; no other may pass
        it."""
        request = self._head
        if request is None or not self.free_slots:
            return False
        # A preempted request with calls in flight cannot be prefilled: some of its tokens are
        # unknown.
        if request.in_flight or self._refused == (request, self.pool.num_changes):
            return False
        if any(not (active.pages or active.leader) for active in self.active):  # they come first
            return False
        if not self.prefixes.admit(request, self._pages.num_pages(request.num_tokens), self.active):
            self._refused = request, self.pool.num_changes
            return False
        self.waiting.remove(request)
        request.state = RequestState.PREFILL
        _insert(self.active, request)
        return True

    @property
    def _head(self) -> Request | None:
        """The request of the queue that is admitted next."""
        return next((r for r in self.waiting if not self.is_draining or r.has_begun), None)

    @property
    def _is_awaited(self) -> bool:
        """Whether a request has a slot to take and may wait for pages only."""
        return bool(self.waiting and self.free_slots)

    def _takes_all(self, request: Request, tokens: list[list[int]], counts: list[int]) -> bool:
        """Whether a request keeps the tokens of all rounds of a call and goes on, so that they need
        no check one by one.

        Args:
          tokens, counts: of each round, as in `commit_decode`.
        """
        if request.is_finished or not request.is_simple or min(counts) <= 0:
            return False
        ends, total = request.ends(self.eos_ids), sum(counts)
        return (
            total < request.params.max_tokens - len(request.output)
            and total < self.config.max_model_len - request.num_tokens
            and all(ends.isdisjoint(new) for new in tokens)
        )

    def _count(
        self, request: Request, before: list[int], drafted: int, produced: int, kept: int
    ) -> int:
        """Counts a round that verified the first `drafted` of the drafts `before`, of which `kept`
        tokens became output. Returns how many passed; `produced` is a count as in
        `commit_decode`."""
        # A failed round emits accepted drafts only, without the target's own token.
        accepted = produced - 1 if produced > 0 else -1 - produced
        verified = before[:drafted]
        # If a text ends on a draft, later drafts that passed do not become output.
        passed = accepted if accepted < kept else kept
        request.record_round(verified, passed, kept)
        self.counts.count(len(verified), passed, kept)
        return accepted

    def _remove(self, request: Request) -> None:
        """Removes a request from the queue or the active list and frees its slot and pages."""
        if request.slot is None:
            self.waiting.remove(request)
            return
        self.active.remove(request)
        self._pages.num_changes += 1
        self.free_slots.release(request.slot, request.chain, request.written)
        self.pool.release(request.pages)
        request.slot = request.leader = None
        request.pages, request.chain = [], []

    def _receive(
        self,
        request: Request,
        row: int,
        tokens: list[int],  # C
        count: int,
        logprobs: BatchLogprobs | None,
    ) -> Update:
        """Appends a row's tokens, then frees the finished request or its surplus pages.

        A negative count is -1 - n: only the first n tokens come from finite logits. The request
        fails after them, unless one of them ends its text.
        """
        assert count, f"a call produced no token for request {request.id}"
        is_finite = count > 0
        count = count if is_finite else -1 - count
        num_top = request.params.logprobs
        wanted = None
        if logprobs is not None and num_top is not None:
            wanted = logprobs.row(row, count, num_top)
        kept = request.append(
            tokens[:count],
            eos_ids=self.eos_ids,
            max_model_len=self.config.max_model_len,
            logprobs=wanted,
        )
        if not (is_finite or request.is_finished):
            self.num_not_finite += 1
            request.fail(NOT_FINITE)
        self._kept(request)
        return request, kept

    def _kept(self, request: Request) -> None:
        """Publishes the final pages of a request whose output has grown, and frees those that it
        does not need."""
        if request.slot is not None:  # a preempted request has given its pages up
            self.prefixes.publish(request, request.num_tokens - 1)
        if request.is_finished:
            self._remove(request)
        elif request.state is RequestState.RUNNING:
            self._pages.trim(request, self._is_awaited)


def _insert(requests: list[Request], request: Request) -> None:
    bisect.insort(requests, request, key=lambda waiting: waiting.rank)
