"""One request of a client: what it asks for (`Ask`), and the stream of its output (`Stream`).

The event loop pushes the tokens of each round; the client reads at its own pace. Unread tokens are
merged into one delta, so a stream never holds more than its text, and a slow client delays no
other.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from peagle_jax import SamplingParams
from peagle_jax.engine.host.request import PromptLogprob, Round, TokenLogprob, at_least
from peagle_jax.engine.host.stats import Acceptance
from serving import caller
from serving.errors import Code, ServiceError, failure
from serving.messages import Ended, MatcherOf, Tokens
from serving.replies.parts import Item, ReplyParser, ReplyPart, ToolCall


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, independent of the protocol.

    Args:
      request_id: the client's id, or a new one; unique among the open requests of its caller.
      prompt: token ids.
      params: sampling parameters.
      n: sequences to generate. Untrusted: `Frontend.open` checks it, and `Stream.n` is the checked
        value.
      priority: requests with a lower number leave the queue first.
      deadline: `time.monotonic()` at which the request ends.
      cache_salt: the client's salt of the prefix cache; requests of other callers never share a
        prefix.
      wants_text: whether deltas hold text; they always hold tokens.
      is_chat: whether reasoning is separated from the reply, where the model marks it.
      tools: tools that the reply may call, as OpenAI's clients send them; none: calls are text.
      protocol: "grpc" or "http"; for logs.
      method: the method or path that the client called; for logs.
      trace: headers of the client's trace (W3C), lower-case.
      spelling: the client's names of "prompt", "n" and fields of `params`, where they differ from
        ours.
      matchers: the constraint of `params`, compiled for each sequence; `Frontend.constrain` sets
        it.
      caller: the client that sent the request; see `caller`.
      arrival: `time.monotonic()` at which its call, or its message in a stream of requests,
        arrived.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    wants_text: bool = True
    is_chat: bool = False
    tools: Sequence[dict] = ()
    protocol: str = "grpc"
    method: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    matchers: Sequence[MatcherOf] = ()
    arrival: float = field(default_factory=caller.arrival)
    caller: str = field(default_factory=caller.current)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a sequence ended: "stop" (by `stop_reason`: a token id or a stop string), "length",
    "abort".

    A sequence that fails ends its whole request with a `ServiceError` instead.
    """

    reason: str
    stop_reason: int | str | None
    completion_tokens: int
    acceptance: Acceptance


@dataclass(kw_only=True, slots=True)  # not frozen: that would take four times as long to make
class Delta:
    """New output of a sequence since the last delta of the same `index`.

    If a stop string ended the text, `tokens` include the token that completed it, and `text`
    excludes it. `reasoning` is the reasoning of a chat model, `calls` are its complete tool calls;
    `text` includes neither. `order` is that of `ReplyPart`. The first delta of a sequence has
    `prompt_logprobs`, if they were asked for. `rounds` are the rounds that made `tokens`; prefill
    made the first token of a sequence.
    """

    index: int
    tokens: list[int]
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    order: tuple[Item, ...] = ()
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    rounds: list[Round]
    finish: Finish | None

    @property
    def reply(self) -> ReplyPart:
        """Its text, reasoning and calls."""
        return ReplyPart(self.text, self.reasoning, self.calls, self.order)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts over all sequences of a request, also of those cut short; times in seconds from its
    arrival.

    `cached_tokens` are the prompt tokens that the prefix cache had for the first sequence.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    acceptance: Acceptance
    time_to_first_token: float
    duration: float
    versions: list[str]
    """Of the weights that wrote the output, in their order."""


_NO_TEXT = ReplyPart()
_EARLY_SECONDS = 0.05  # a client's deadline passes so much before the server's, and
_EARLY_SHARE = 0.01  # by this share of the time between arrival and deadline


@dataclass
class _Progress:
    """Counts of a sequence that has not ended, with the fields that `Acceptance.of` reads."""

    num_tokens: int = 0
    by_drafts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rounds by their numbers of drafts: verified, accepted."""

    def add(self, event: Tokens) -> None:
        """Counts the output of a round."""
        self.num_tokens += len(event.tokens)
        if event.round is not None:
            drafts = len(event.round.drafts), event.round.accepted
            self.by_drafts[drafts] = self.by_drafts.get(drafts, 0) + 1

    @property
    def rounds(self) -> int:
        return sum(self.by_drafts.values())

    @property
    def emitted(self) -> int:
        return max(0, self.num_tokens - 1)  # prefill makes the first one

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def drafted_per_position(self) -> list[int]:
        return self._per_position(0)

    @property
    def accepted_per_position(self) -> list[int]:
        return self._per_position(1)

    def _per_position(self, kind: int) -> list[int]:
        most = max((drafts[0] for drafts in self.by_drafts), default=0)
        rounds = [0] * (most + 1)
        for drafts, count in self.by_drafts.items():
            rounds[drafts[kind]] += count
        return at_least(rounds)


@dataclass
class _Sequence:
    """Output of one sequence that the client has not read yet, and counts of all its output."""

    parser: ReplyParser | None
    progress: _Progress = field(default_factory=_Progress)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    rounds: list[Round] = field(default_factory=list)
    request: Ended | None = None
    is_read: bool = False  # the client has read the finish

    @property
    def has_news(self) -> bool:
        return not self.is_read and bool(self.tokens or self.request)

    def take(self, index: int) -> Delta:
        tokens, logprobs, rounds, request = self.tokens, self.logprobs, self.rounds, self.request
        self.tokens, self.logprobs, self.rounds = [], None, []
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        reply = self.parser.add(tokens) if self.parser else _NO_TEXT
        finish = None
        if request is not None:
            reply += self.parser.finish() if self.parser else _NO_TEXT
            self.is_read = True
            finish = Finish(
                reason=request.finish_reason,
                stop_reason=request.stop_reason,
                completion_tokens=request.num_tokens,
                acceptance=Acceptance.of([request]),
            )
        return Delta(
            index=index,
            tokens=tokens,
            text=reply.text,
            reasoning=reply.reasoning,
            calls=reply.calls,
            order=reply.order,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            rounds=rounds,
            finish=finish,
        )


class Stream:
    """Output of an open request: an asynchronous iterator of `Delta`. Leaving its context ends the
    request.

    Made by `Frontend.open`.

    Attributes:
      n: sequences, within the limits of engine and server.
      code: how the request ended: OK, CANCELLED if the client left, DEADLINE_EXCEEDED if it did so
        at its deadline, or the error's code; None while it is open.
      arrival, first_token, end: `time.monotonic()`.
    """

    def __init__(
        self,
        ask: Ask,
        number: int,
        new_parser: Callable[[], ReplyParser | None],
        *,
        end: Callable[[tuple[int, int]], None],
        on_close: Callable[["Stream"], None],
        deadline: float | None,
    ):
        self.ask, self.number, self.n = ask, number, ask.n
        self.code: Code | None = None
        self.error: ServiceError | None = None
        self.arrival = ask.arrival
        self.first_token: float | None = None
        self.end: float | None = None
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache had for the first sequence; known with its first
        token.
        """
        self.requests: list[Ended] = []
        """How the sequences ended that have ended in the engine."""
        self._end, self._on_close = end, on_close
        self._sequences = [_Sequence(new_parser()) for _ in range(ask.n)]
        self._num_unread = ask.n  # sequences whose end the client has not read
        self._news: asyncio.Future[None] | None = None
        """What the reader waits for; None while it does not wait."""
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(deadline - time.monotonic(), self._expire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        # An OSError means that the connection is lost: the client's end, not an error of ours.
        if isinstance(error, Exception) and not isinstance(error, OSError) and self.error is None:
            self.error = error if isinstance(error, ServiceError) else failure(error)
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self.error is not None:
                raise self.error
            for index, sequence in enumerate(self._sequences):
                if sequence.has_news:
                    delta = sequence.take(index)
                    self._num_unread -= sequence.is_read
                    return delta
            if not self._num_unread:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None

    def push(self, index: int, event: Tokens) -> None:
        """Adds the output of a round to sequence `index`."""
        sequence = self._sequences[index]
        sequence.tokens += event.tokens
        sequence.progress.add(event)
        if index == 0:
            self.cached_tokens = event.cached_tokens
        if event.round is not None:
            sequence.rounds.append(event.round)
        if event.prompt_logprobs is not None:
            sequence.prompt_logprobs = event.prompt_logprobs
        if event.logprobs is not None:
            if sequence.logprobs is None:
                sequence.logprobs = []
            sequence.logprobs += event.logprobs
        if event.tokens and self.first_token is None:
            self.first_token = time.monotonic()
        if event.request is not None:
            sequence.request = event.request
            self.requests.append(event.request)
        self._wake_reader()

    def fail(self, error: ServiceError) -> None:
        """Ends the request with `error`; the reader gets the error instead of unread output."""
        if self.error is None:
            self.error = error
            self._end_sequences()
            self._wake_reader()

    def abort(self) -> None:
        """Ends all sequences that run, with the finish reason "abort"."""
        self._end_sequences()

    @property
    def finish_reasons(self) -> list[str]:
        """How the sequences of a closed stream ended. Those that the engine has not returned were
        aborted, or failed with it.
        """
        reasons = [request.finish_reason for request in self.requests]
        refusals = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
        if self.code is None or (self.code in refusals and self.first_token is None):
            return reasons
        rest = "error" if self.code is Code.INTERNAL else "abort"
        return reasons + [rest] * (self.n - len(reasons))

    def usage(self) -> Usage:
        """Counts and times of the request; complete once every sequence has ended."""
        first, now = self.first_token, self.end or time.monotonic()
        # A request that is cancelled is reported before the engine returns its sequences.
        running = [one.progress for one in self._sequences if one.request is None]
        num_tokens = sum(request.num_tokens for request in self.requests)
        return Usage(
            prompt_tokens=len(self.ask.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=num_tokens + sum(one.num_tokens for one in running),
            acceptance=Acceptance.of([*self.requests, *running]),
            time_to_first_token=0.0 if first is None else first - self.arrival,
            duration=now - self.arrival,
            versions=list(
                dict.fromkeys(one for request in self.requests for _, one in request.versions)
            ),
        )

    def close(self) -> None:
        """Ends the request in the engine and reports its outcome; further calls do nothing."""
        if self.code is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._end_sequences()
        self.end = time.monotonic()
        if self.error is not None:
            self.code = self.error.code
            self.error.is_reported = True
        elif not self._num_unread:
            self.code = Code.OK
        else:
            self.code = Code.DEADLINE_EXCEEDED if self._is_late() else Code.CANCELLED
        self._on_close(self)

    def _wake_reader(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _is_late(self) -> bool:
        """Whether the client has left because its own deadline passed.

        Its clock begins before ours, and gRPC rounds what is left up to three digits: the call ends
        before the deadline that the server sees.
        """
        deadline = self.ask.deadline
        if deadline is None:
            return False
        return self.end >= deadline - _EARLY_SECONDS - _EARLY_SHARE * (deadline - self.arrival)

    def _expire(self) -> None:
        waited = time.monotonic() - self.arrival
        where = "in the queue" if self.first_token is None else "while it generated"
        self.fail(
            ServiceError(Code.DEADLINE_EXCEEDED, f"the time was up after {waited:.3g} s, {where}")
        )

    def _end_sequences(self) -> None:
        for index, sequence in enumerate(self._sequences):
            if sequence.request is None:
                self._end((self.number, index))
