"""The state of one request, from arrival to its last token.

The scheduler changes its state and assigns its slot and pages. `append` applies the stop
conditions.
"""

import enum
import itertools
import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from peagle_jax.engine.host.pages import Salt
from peagle_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle_jax.engine.structured.grammar import Matcher

FinishReason = Literal["stop", "length", "abort", "error"]

NOT_FINITE = (
    "the model's logits are not finite numbers (NaN or infinity): its weights or their scales are "
    "damaged, or a number overflows the compute dtype"
)


class RequestState(enum.Enum):
    """WAITING -> PREFILL -> RUNNING -> FINISHED; preemption leads back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"  # holds a slot and pages; chunks of its tokens remain to be sent
    RUNNING = "running"  # its last chunk was dispatched; rounds decode it
    FINISHED = "finished"


class RingCopy(NamedTuple):
    """Copies the rings of all windowed layers from one row of the cache to another, see
    `SavedRings`."""

    source: int
    target: int


class TokenLogprob(NamedTuple):
    """Log-probability of one output token, and the (id, logprob) pairs of the most likely tokens,
    without those that the law drops."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprob(NamedTuple):
    """As `TokenLogprob` for a token of the prompt, with its rank: 1 for the most likely token."""

    logprob: float
    top: list[tuple[int, float]]
    rank: int


class BatchLogprobs(NamedTuple):
    """Log-probabilities of the tokens [B, C] of one call, with n alternatives for each token."""

    chosen: np.ndarray  # [B, C]
    top_ids: np.ndarray  # [B, C, n]
    top_logprobs: np.ndarray  # [B, C, n]

    def row(self, row: int, count: int, num_top: int) -> list[TokenLogprob]:
        """The first `count` tokens of a row, with at most `num_top` alternatives each."""
        ids = self.top_ids[row, :count, :num_top].tolist()
        logprobs = self.top_logprobs[row, :count, :num_top].tolist()
        pairs = (zip(*top, strict=True) for top in zip(ids, logprobs, strict=True))
        tops = [[pair for pair in top if pair[1] != -math.inf] for top in pairs]
        return list(map(TokenLogprob, self.chosen[row, :count].tolist(), tops))


class Round(NamedTuple):
    """One round of one request: it verified `drafts`, and the first `accepted` became output."""

    drafts: list[int]
    accepted: int
    tokens: int
    """Number of output tokens: `accepted`, and the target's own token unless the text ended
    before."""


@dataclass(kw_only=True, eq=False)
class Request:
    """A request: parameters, output so far, and resources. Compared by identity; slots are reused.

    Args:
      id: chosen by the caller.
      prompt: token ids, at least one.
      params: sampling parameters.
      num_draft: most drafts per round for this request, at most the engine's J.
      seed: 63-bit seed of its random key.
      priority: requests with a lower number come first, as in vLLM.
      stop_checker: called with the output after each token; returns the stop string that the text
        contains, or None.
      salt: requests with different salts share no cached prefix.
      reads_prefix_cache: False computes the whole prompt, even if a prefix of it is cached.
      matcher: where the text stands in its grammar, if `params.structured` constrains it.
    """

    id: str | int
    prompt: list[int]
    params: SamplingParams
    num_draft: int
    seed: int
    priority: int = 0
    stop_checker: Callable[[list[int]], str | None] | None = None
    salt: Salt = ()
    reads_prefix_cache: bool = True
    banned_ids: tuple[int, ...] = ()
    """Token ids of `params.bad_words`."""
    matcher: "Matcher | None" = None

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    """One entry per output token when `params.logprobs` asks for them."""
    number: int = 0
    """Position in the order of arrival; the scheduler sets it."""
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """One entry per token of the prompt when `params.prompt_logprobs` asks for them; the first is
    None. Complete with the first output token."""
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or stop string that ended the text, if `finish_reason` is "stop"."""
    error: str | None = None
    """One sentence that describes the failure, if `finish_reason` is "error"."""
    error_is_the_clients: bool = False
    """Whether the request's constraint is the cause of `error`: it exceeds a limit, or no token
    continues it."""

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    """Numbers of its first pages that are in the prefix cache; see `PagePool`."""
    leader: tuple["Request", int] | None = None
    """A request whose prefill computes a prefix of this one, and the position up to which it does:
    this one has a slot, and gets its pages then."""
    begun: bool = False
    """Whether a prefill call has had a row of it since the last admission."""
    save_at: set[int] = field(default_factory=set)
    """Numbers of its first pages after which its rings are saved, see `slots.SavedRings`."""
    restore: RingCopy | None = None
    """The copy of saved rings to its slot, before its first prefill call."""
    written: int = 0
    """No dispatched call wrote this position of the text, or a later one, to the rings of its
    slot."""
    num_cached: int = 0
    """Number of prompt tokens that the prefix cache had at the first admission."""
    num_prefilled: int = 0
    """Number of `tokens` cached, or dispatched in prefill calls, since the last admission."""
    in_flight: int = 0
    """Dispatched but uncommitted calls that yield tokens: rounds, and the final prefill chunk."""
    pending: int = 0
    """Number of drafts that the call dispatched last makes; the next round verifies at most
    these."""
    prefill_in_flight: bool = False
    """Whether one of the calls in flight is the final prefill chunk (it yields exactly one
    token)."""
    drafts: list[int] = field(default_factory=list)
    """Drafts of the call committed last: proposals for the tokens after `output`."""
    unread_drafts: int = 0
    """Dispatched but uncommitted calls that make drafts: those in flight, and the last chunk of a
    prefill after a preemption. `drafts` are those that the next round verifies if this is 0."""
    last_round: Round | None = None
    """The round that `output` grew by last; None if prefill sampled the newest token."""

    versions: list[tuple[int, str]] = field(default_factory=list)
    """The versions of the weights that wrote the output, each with its first token's index."""
    rounds: int = 0
    drafted: int = 0
    """Number of drafts that the target verified: per round at most `num_draft`, K and `pending`."""
    accepted: int = 0
    """Number of drafts that became output."""
    preemptions: int = 0

    arrival_time: float | None = None
    start_time: float | None = None
    """Dispatch time of its first prefill call; the time before is queueing. Times:
    `time.monotonic`."""
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self):
        self._rounds_by_accepted = [0] * (self.num_draft + 1)
        self._rounds_by_drafted = [0] * (self.num_draft + 1)
        self._page_keys: list[bytes] = []
        self._end_ids: frozenset[int] | None = None
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)

    @cached_property
    def needs_branch(self) -> bool:
        """Whether a round of this request needs more than the argmax of the logits as they are."""
        asked = self.params
        is_plain = asked.temperature == 0 and asked.logprobs is None and self.matcher is None
        return not is_plain or asked.is_adjusted

    @property
    def holds_k(self) -> bool:
        """Whether its rounds must have the most drafts: it samples, and its client chose the seed.
        The text of a seed depends on the sequence of K."""
        return self.params.temperature > 0 and self.params.seed is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Order among requests, the most urgent first: by priority, then by arrival."""
        return self.priority, self.number

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prefill calls of this request score its prompt: until it has output."""
        return self.prompt_logprobs is not None and not self.output

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def num_to_prefill(self) -> int:
        """Number of `tokens` to prefill: the prompt, or after a preemption all but the newest
        token.

        The newest token accompanies the last chunk as `PrefillPlan.next_token`. So prefill samples
        no token then, and decoding continues with the same state as without the preemption.
        """
        return self.num_tokens - bool(self.output)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def has_begun(self) -> bool:
        """Whether it runs, or did before a preemption."""
        return self.slot is not None or bool(self.output) or self.in_flight > 0

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def committed(self) -> int:
        """Number of positions whose KV is final, from what the host has committed.

        For a running request: all tokens but the last, whose KV the next round writes. A prompt of
        5 tokens has 5 from the dispatch of its last chunk, and still 5 when the sixth token is
        committed.
        """
        if self.state is not RequestState.RUNNING:
            return self.num_prefilled
        return self.num_tokens - (0 if self.prefill_in_flight else 1)

    def page_keys(self, page_size: int, count: int) -> list[bytes]:
        """Tokens of each of the first `count` pages, and the one after them; all must be known.

        Example: tokens 5 6 7 8 9 with pages of 2 have the keys 5 6 7 and 7 8 9.
        """
        for page in range(len(self._page_keys), count):
            start, stop = page * page_size, (page + 1) * page_size + 1
            size = len(self.prompt)
            tokens = self.prompt[start:stop]
            if stop > size:
                tokens = tokens + self.output[max(0, start - size) : stop - size]
            assert len(tokens) == stop - start, f"request {self.id} has no page {page} yet"
            self._page_keys.append(array("i", tokens).tobytes())
        return self._page_keys[:count]

    @property
    def accepted_per_position(self) -> list[int]:
        """Number of rounds in which draft 1, 2, .. became output."""
        return at_least(self._rounds_by_accepted)

    @property
    def drafted_per_position(self) -> list[int]:
        """Number of rounds that verified draft 1, 2, .."""
        return at_least(self._rounds_by_drafted)

    @property
    def rounds_in_flight(self) -> int:
        """Number of rounds in flight; each commits between 1 and K+1 positions, K at most J."""
        return self.in_flight - self.prefill_in_flight

    @property
    def emitted(self) -> int:
        """Number of output tokens emitted by rounds: all but the first, which prefill samples."""
        return max(0, len(self.output) - 1)

    def writes_below(self, position: int) -> None:
        """Records a dispatched call that writes positions below `position`."""
        self.written = max(self.written, position)

    def record_round(self, drafts: list[int], num_accepted: int, num_tokens: int) -> None:
        """Counts one round that verified `drafts`, of which the first `num_accepted` became
        output."""
        self.last_round = Round(drafts, num_accepted, num_tokens)
        self.rounds += 1
        self.drafted += len(drafts)
        self.accepted += num_accepted
        self._rounds_by_accepted[num_accepted] += 1
        self._rounds_by_drafted[len(drafts)] += 1

    def force_drafts(self, most: int) -> list[int]:
        """Replaces the first `drafts`, at most `most`, by the tokens that the constraint forces.

        Returns:
          These tokens.
        """
        forced = self.matcher.forced(most)
        self.drafts[: len(forced)] = forced
        return forced

    def append(
        self,
        tokens: Sequence[int],
        *,
        eos_ids: Collection[int],
        max_model_len: int,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> list[int]:
        """Appends tokens until one ends the text; the ending token is kept, later ones are dropped.

        The request fails if its matcher has exceeded its limits. With stop id 9 and `tokens`
        [4, 9, 7] the output grows by [4, 9] and the request is FINISHED.

        Args:
          tokens: what one call produced, in order.
          eos_ids: the model's end-of-sequence ids.
          max_model_len: most tokens of prompt and output together.
          logprobs: one entry per token, stored when the request asked for them.

        Returns:
          The tokens that were kept.
        """
        assert not self.is_finished, f"request {self.id} is finished and was given tokens"
        if self.matcher is not None and self.matcher.error is not None:
            self._fail_by_constraint(self.matcher.error)  # the masks of the call are not complete
            return []
        room = min(self.params.max_tokens - len(self.output), max_model_len - self.num_tokens)
        if self.is_simple and len(tokens) < room and self.ends(eos_ids).isdisjoint(tokens):
            self.output += tokens
            return list(tokens)
        kept = []
        for index, token in enumerate(tokens):
            self.output.append(token)
            kept.append(token)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs.append(logprobs[index])
            self._finish_if_ended(token, eos_ids, max_model_len)
            if self.is_finished:
                return kept
        if self.matcher is not None:
            self.matcher.consume(kept)
            if self.matcher.error is not None:
                self._fail_by_constraint(self.matcher.error)
        return kept

    @cached_property
    def is_simple(self) -> bool:
        """Whether only a token or the length can end the text, and tokens are all that is kept of
        it."""
        return self.logprobs is None and self.stop_checker is None and self.matcher is None

    def ends(self, eos_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end the text; `eos_ids` are those of the model."""
        if self._end_ids is None:
            self._end_ids = frozenset(self.params.end_ids(eos_ids))
        return self._end_ids

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Enters the terminal state. The scheduler frees slot and pages."""
        assert not self.is_finished, f"request {self.id} finished twice"
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def fail(self, error: str) -> None:
        """Enters the terminal state after a failure; `error` is one sentence for users."""
        self.finish("error")
        self.error = error

    def _fail_by_constraint(self, error: str) -> None:
        self.fail(error)
        self.error_is_the_clients = True

    def _finish_if_ended(self, token: int, eos_ids: Collection[int], max_model_len: int) -> None:
        # If one token satisfies both, "stop" takes precedence over "length".
        is_eos = token in eos_ids and not self.params.ignore_eos
        if is_eos or token in self.params.stop_ids:
            # Before `min_tokens` the device forbids these, unless a mask leaves nothing else.
            self.finish("stop", token)
            return
        stop_string = self.stop_checker(self.output) if self.stop_checker is not None else None
        if stop_string is not None and len(self.output) > self.params.min_tokens:
            self.finish("stop", stop_string)
        elif len(self.output) >= self.params.max_tokens or self.num_tokens >= max_model_len:
            self.finish("length")


def at_least(rounds: Sequence[int]) -> list[int]:
    """Rounds with 1, 2, .. drafts or more, from the numbers of rounds with 0, 1, 2, .. drafts."""
    return list(itertools.accumulate(rounds[:0:-1]))[::-1]
