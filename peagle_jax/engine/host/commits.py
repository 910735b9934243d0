"""Commits results of device calls: texts, counts, and the pages that requests hold. No jax here."""

from collections.abc import Collection, Iterator

import numpy as np

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.calls import DecodeCall, PrefillCall
from peagle_jax.engine.host.k_by_load import LoadPolicy
from peagle_jax.engine.host.pages import PagePool
from peagle_jax.engine.host.prefixes import PrefixCache
from peagle_jax.engine.host.request import NOT_FINITE, BatchLogprobs, Request, RequestState
from peagle_jax.engine.host.reservation import Reservation
from peagle_jax.engine.host.stats import Acceptance, RoundCounter

Update = tuple[Request, list[int]]
"""A request and the tokens a commit added to its output, for streaming."""


class Commits:
    """The part of `scheduler.Scheduler` that commits results. Arguments as there."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_ids: Collection[int],
        windows: Collection[int],
        policy: LoadPolicy | None,
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
        self.counts = RoundCounter(config)

    @property
    def acceptance(self) -> Acceptance:
        """Counts over all committed rounds with drafts."""
        return self.counts.acceptance

    @property
    def _is_awaited(self) -> bool:
        """Whether a request has a slot to take and may wait for pages only."""
        return bool(self.waiting and self.free_slots)

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
                results = (tokens[row].tolist(), int(count[row]))
                updates.append(self._receive(request, row, *results, logprobs))
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
        """Commits one round: appends its tokens, counts its drafts, frees surplus pages."""
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
        tokens: np.ndarray,  # [N, B, K+1]
        count: np.ndarray,  # [N, B], as of `commit_decode`
        drafts: np.ndarray,  # [N, B, K], of each round for the next
    ) -> Iterator[Update]:
        """Commits the N rounds of one call, all of one request before the next one.

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
