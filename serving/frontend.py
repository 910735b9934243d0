"""From a request in any protocol to a stream of deltas: admission, deadlines, draining, accounting.

A servicer turns its message into an `Ask`, opens it, and reads:

    async with frontend.open(ask) as stream:
        async for delta in stream:
            ...

Leaving the block early, for whatever reason, ends the request in the engine. Every stream is reported
exactly once, with one status. All of this runs in one event loop; only the worker has a thread.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

import grpc

from peagle_jax import ConfigError, Engine, SamplingParams
from peagle_jax.engine.scheduler import QueueFull
from peagle_jax.text import Tokenizer
from serving import caller
from serving.errors import ServiceError, invalid
from serving.harmony import HarmonyIds, parser_factory
from serving.limits import Limits
from serving.memory import MemoryReturn
from serving.metrics import Metrics
from serving.stream import Ask, Stream
from serving.tokenizing import Encoder
from serving.worker import EngineWorker, Event, Job, Load, Refused

_log = logging.getLogger(__name__)
_POOL_SECONDS = 10.0  # to wait at the end for texts that are being tokenised


class State(enum.Enum):
    """STARTING -> SERVING -> DRAINING -> STOPPED; DEAD from anywhere."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class Frontend:
    """One engine, open for requests.

    Args:
      engine: not yet warm, with or without a tokenizer.
      name: what clients call the model.
      limits: see `Limits`.
      report: called with each stream after its end (logs, traces).
      report_refusal: called with protocol, method and error of each request that became no stream.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        limits: Limits | None = None,
        report: Callable[[Stream], None] = lambda stream: None,
        report_refusal: Callable[[str, str, ServiceError], None] = lambda *refusal: None,
    ):
        self.name = name
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.channels = HarmonyIds.of(self.tokenizer)
        self._validate = engine.validate
        self.config = engine.config
        self.target_config = engine.target_config
        self.drafter_config = engine.drafter_config
        self.method = "none" if self.drafter_config is None else self.drafter_config.method
        self.limits = limits or Limits()
        self.memory = MemoryReturn()
        self._encoder = Encoder(
            self.tokenizer,
            self.limits,
            max_model_len=self.config.max_model_len,
            memory=self.memory,
        )
        self.started = time.time()
        self._report, self._report_refusal = report, report_refusal
        self._worker = EngineWorker(
            engine,
            deliver=self._deliver,
            on_ready=self._serve,
            on_death=self._die,
        )
        self.metrics = Metrics(name, self)
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._by_id: dict[tuple[str, str], Stream] = {}
        """By caller and request id: what others run is hidden from a caller."""
        self._changed = asyncio.Event()
        self.state = State.STARTING
        self.is_stuck = False
        """Whether the engine's thread outlived `drain`."""

    @property
    def load(self) -> Load:
        """What the engine held after its last round."""
        return self._worker.load

    @property
    def batch_sizes_pending(self) -> int:
        """Batch sizes that still compile; until then rounds take the next larger."""
        return self._worker.batch_sizes_pending

    @property
    def num_open(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the engine; `state` becomes SERVING when the largest batch is compiled."""
        self._worker.start()

    async def change(self, known: State) -> State:
        """Waits until the state is another than `known`, and returns it."""
        while self.state is known:
            await self._changed.wait()
        return self.state

    async def watch(self, seconds: float) -> None:
        """Declares the engine dead when one of its rounds takes longer than `seconds`.

        A device that hangs raises nothing: without this, clients would wait for ever.
        """
        while self.state in (State.STARTING, State.SERVING, State.DRAINING):
            await asyncio.sleep(min(1.0, seconds / 4))
            since = self._worker.busy_since
            if since is not None and time.monotonic() - since > seconds:
                self._die(TimeoutError(f"a round has taken more than {seconds:g} s"))

    async def encode(self, text: str, *, field: str, deadline: float | None = None) -> list[int]:
        """See `Encoder.encode`.

        Args:
          deadline: the client's own, as `time.monotonic()`.

        Raises:
          ServiceError: DEADLINE_EXCEEDED too.
        """
        async with self._before(self._deadline(caller.arrival(), deadline)):
            return await self._encoder.encode(text, field=field)

    async def chat(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, object], *, field: str
    ) -> list[int]:
        """See `Encoder.chat`; raises as `encode` does."""
        async with self._before(self._deadline(caller.arrival(), None)):
            return await self._encoder.chat(messages, variables, field=field)

    def open(self, ask: Ask) -> Stream:
        """Accepts a request; what the engine does not accept arrives when the stream is read.

        Raises:
          ServiceError: UNAVAILABLE while the engine starts, drains or is dead; INVALID_ARGUMENT and
            ALREADY_EXISTS for requests that cannot run; DEADLINE_EXCEEDED when it is too late already.
        """
        try:
            self._check(ask)
        except ServiceError as error:
            self.refused(ask.protocol, ask.method, error)
            raise
        number = next(self._numbers)
        new_parser = parser_factory(
            self.tokenizer if ask.wants_text else None,
            self.channels if ask.is_chat else None,
            ask.params.stop,
        )
        stream = Stream(
            ask,
            number,
            new_parser,
            end=self._worker.abort,
            on_close=self._close,
            deadline=self._deadline(ask.arrival, ask.deadline),
        )
        self._streams[number] = stream
        self._by_id[ask.caller, ask.request_id] = stream
        jobs = [
            Job((number, index), ask.prompt, _numbered(ask.params, index)) for index in range(ask.n)
        ]
        self._worker.submit(jobs)
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request of the current caller: its stream ends with the reason "abort". False if it runs
        none of that id."""
        stream = self._by_id.get((caller.current(), request_id))
        if stream is not None:
            stream.abort()
        return stream is not None

    def refused(self, protocol: str, method: str, error: ServiceError) -> None:
        """Reports a request that never became a stream, unless that was done."""
        if not error.is_reported:
            error.is_reported = True
            self.metrics.refused(protocol, error)
            self._report_refusal(protocol, method, error)

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests, lets the open ones end, and stops the engine.

        Returns:
          Whether all ended by themselves within `seconds`; the rest get UNAVAILABLE.
        """
        # Of what still compiles, or hangs, nobody waits for the end.
        patience = 30.0 if self.state is State.SERVING else 0.0
        if self.state is not State.DEAD:
            self._enter(State.DRAINING)
        deadline = time.monotonic() + seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        rest = list(self._streams.values())
        for stream in rest:
            stream.fail(
                ServiceError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the server shut down after waiting {seconds:g} s for its requests; "
                    "send this one to another server",
                )
            )
        self._encoder.close()
        self.memory.close()
        self.is_stuck = not await asyncio.to_thread(self._worker.stop, patience)
        # A thread that outlives the server could still write to its log.
        await self._encoder.wait_closed(_POOL_SECONDS)
        if self.state is not State.DEAD:
            self._enter(State.STOPPED)
        return not rest

    def _check(self, ask: Ask) -> None:
        if self.state is not State.SERVING:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                f"the engine is {self.state.value}; try again or use another server",
                retry_after=None if self.state is State.DEAD else 1.0,
            )
        if (ask.caller, ask.request_id) in self._by_id:
            raise ServiceError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"request_id {ask.request_id!r} is running; ids must be unique while they run",
            )
        self._check_count(ask)
        try:
            self._validate(ask.prompt, ask.params)
        except ConfigError as error:
            raise invalid(ask.spelling.get(error.field, error.field), error.rule) from error
        now = time.monotonic()
        if ask.deadline is not None and ask.deadline <= now:
            raise ServiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline had passed when the request came"
            )
        latest = self._deadline(ask.arrival, None)
        if latest is not None and latest <= now:
            raise _is_late(now - ask.arrival)

    def _deadline(self, arrival: float, own: float | None) -> float | None:
        """The earlier of a client's own deadline and the server's limit, as `time.monotonic()`."""
        most = self.limits.max_seconds
        latest = [] if most is None else [arrival + most]
        return min(latest + ([] if own is None else [own]), default=None)

    @contextlib.asynccontextmanager
    async def _before(self, deadline: float | None) -> AsyncIterator[None]:
        """Ends the work within at the deadline, with DEADLINE_EXCEEDED."""
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _is_late(time.monotonic() - caller.arrival()) from error

    def _check_count(self, ask: Ask) -> None:
        n, most, rule = ask.n, self.limits.max_n, None
        if not 1 <= n <= most:
            rule = f"{n} must lie between 1 and {most}"
        elif n > 1 and ask.params.temperature == 0:
            rule = f"{n} greedy sequences would be equal; set a temperature, or n to 1"
        if rule is not None:
            raise invalid(ask.spelling.get("n", "n"), rule)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Refused):
                number = event.keys[0][0]
                if stream := self._streams.get(number):
                    stream.fail(self._refusal(event.error))
            elif stream := self._streams.get(event.key[0]):
                stream.push(event.key[1], event)
                if event.request is not None and event.request.error is not None:
                    stream.fail(ServiceError(grpc.StatusCode.INTERNAL, event.request.error))
        self.metrics.round(events)

    def _refusal(self, error: Exception) -> ServiceError:
        if isinstance(error, QueueFull):
            return ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the queue is full: {error}",
                retry_after=self.metrics.seconds_per_request(),
            )
        return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _close(self, stream: Stream) -> None:
        del self._streams[stream.number]
        key = stream.ask.caller, stream.ask.request_id
        if self._by_id.get(key) is stream:
            del self._by_id[key]
        self.metrics.ended(stream)
        self._report(stream)

    def _die(self, error: BaseException) -> None:
        _log.error("the engine is dead: %r", error)
        self._enter(State.DEAD)
        for stream in list(self._streams.values()):
            stream.fail(
                ServiceError(
                    grpc.StatusCode.INTERNAL,
                    f"the engine died ({type(error).__name__}); the server's log says why",
                )
            )

    def _serve(self) -> None:
        self._enter(State.SERVING)
        if self.state is State.SERVING:
            # Not before: it imports for a second, and tracing the first programs would wait for that.
            self._encoder.prepare()

    def _enter(self, state: State) -> None:
        if self.state is State.DRAINING and state is State.SERVING:
            return  # told to stop while it was compiling
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()


def _is_late(seconds: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"the time was up after {seconds:.3g} s, before the request came to the engine",
    )


def _numbered(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sequence `index` of a request: seeds must differ, and stay the client's for 0."""
    if index == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)
