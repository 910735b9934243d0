"""One request of a client: what it asked for, and what it reads.

The loop pushes what rounds produce; the client reads at its own pace. A slow reader finds what came
meanwhile merged into one delta, so a stream never holds more than its text, and nobody waits for it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from peagle_jax import SamplingParams
from peagle_jax.engine.request import Request, TokenLogprob
from peagle_jax.engine.stats import Acceptance
from serving import caller
from serving.errors import Code, ServiceError, failure
from serving.harmony import ReplyParser, ReplyPart
from serving.worker import Tokens


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client asks for, in no protocol's terms.

    Args:
      request_id: the client's name for it, or one made for it; unique among its caller's while it runs.
      prompt: token ids.
      params: sampling parameters.
      n: sequences to generate, as the client wrote it: it may be billions. `Stream.n` is checked.
      deadline: `time.monotonic()` at which it must have ended.
      wants_text: whether deltas hold text; tokens come in any case.
      is_chat: whether the reply's reasoning is told apart, where the model marks it.
      protocol: "grpc" or "http"; for logs.
      method: what the client called; for logs.
      trace: headers of the client's trace (W3C), lower-case.
      spelling: the client's names of "prompt", "n" and fields of `params`, where they are others.
      caller: whose request it is; see `caller`.
      arrival: `time.monotonic()` at which its call, or its message in a stream of requests, arrived.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    deadline: float | None = None
    wants_text: bool = True
    is_chat: bool = False
    protocol: str = "grpc"
    method: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    arrival: float = field(default_factory=caller.arrival)
    caller: str = field(default_factory=caller.current)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a sequence ended: "stop" (by `stop_reason`: a token id or a stop string), "length", "abort".

    A sequence that fails ends its whole request with a `ServiceError` instead.
    """

    reason: str
    stop_reason: int | str | None
    completion_tokens: int
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a sequence grew by since the last delta of the same `index`.

    Of a text that a stop string ended, `tokens` go on to the token in which it ended, `text` does not.
    `reasoning` is what a chat's model thought aloud; it is no part of `text`.
    """

    index: int
    tokens: list[int]
    text: str
    reasoning: str = ""
    logprobs: list[TokenLogprob] | None
    finish: Finish | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Over all sequences of a request that have ended; times in seconds from its arrival."""

    prompt_tokens: int
    completion_tokens: int
    acceptance: Acceptance
    time_to_first_token: float
    duration: float


@dataclass
class _Sequence:
    """What came for one sequence and was not read yet."""

    parser: ReplyParser | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    request: Request | None = None
    is_read: bool = False  # its finish was

    @property
    def has_news(self) -> bool:
        return not self.is_read and bool(self.tokens or self.request)

    def take(self, index: int) -> Delta:
        tokens, logprobs, request = self.tokens, self.logprobs, self.request
        self.tokens, self.logprobs = [], None
        reply = self.parser.add(tokens) if self.parser else ReplyPart()
        finish = None
        if request is not None:
            reply += self.parser.finish() if self.parser else ReplyPart()
            self.is_read = True
            finish = Finish(
                reason=request.finish_reason,
                stop_reason=request.stop_reason,
                completion_tokens=len(request.output),
                acceptance=Acceptance.of([request]),
            )
        return Delta(
            index=index,
            tokens=tokens,
            text=reply.text,
            reasoning=reply.reasoning,
            logprobs=logprobs,
            finish=finish,
        )


class Stream:
    """An asynchronous iterator of `Delta`, and a context that ends the request when it is left.

    Made by `Frontend.open`.

    Attributes:
      n: sequences, within the limits of engine and server.
      code: how it ended: OK, CANCELLED when its client left, or its error's; None until it is closed.
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
        self.requests: list[Request] = []
        """Of the sequences that have ended."""
        self._end, self._on_close = end, on_close
        self._sequences = [_Sequence(new_parser()) for _ in range(ask.n)]
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(deadline - time.monotonic(), self._expire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        # An OSError is a client that has gone.
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
                    return sequence.take(index)
            if all(sequence.is_read for sequence in self._sequences):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def push(self, index: int, event: Tokens) -> None:
        """Takes in what a round gave sequence `index`."""
        sequence = self._sequences[index]
        sequence.tokens += event.tokens
        if event.logprobs is not None:
            sequence.logprobs = (sequence.logprobs or []) + event.logprobs
        if event.tokens and self.first_token is None:
            self.first_token = time.monotonic()
        if event.request is not None:
            sequence.request = event.request
            self.requests.append(event.request)
        self._news.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the request with `error`, which its reader gets before anything it has not read."""
        if self.error is None:
            self.error = error
            self._end_sequences()
            self._news.set()

    def abort(self) -> None:
        """Ends what runs; the reader finds the reason "abort"."""
        self._end_sequences()

    def usage(self) -> Usage:
        """What it took; complete once every sequence has ended."""
        first, now = self.first_token, self.end or time.monotonic()
        return Usage(
            prompt_tokens=len(self.ask.prompt),
            completion_tokens=sum(len(request.output) for request in self.requests),
            acceptance=Acceptance.of(self.requests),
            time_to_first_token=0.0 if first is None else first - self.arrival,
            duration=now - self.arrival,
        )

    def close(self) -> None:
        """Frees everything and reports how it ended; more calls do nothing."""
        if self.code is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._end_sequences()
        self.end = time.monotonic()
        if self.error is not None:
            self.code = self.error.code
            self.error.is_reported = True
        elif all(sequence.is_read for sequence in self._sequences):
            self.code = Code.OK
        else:
            self.code = Code.CANCELLED
        self._on_close(self)

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
