"""The life of the service and of its requests: from a request in any protocol to a stream of
deltas.

A servicer turns its message into an `Ask`, opens it, and reads:

    async with frontend.open(ask) as stream:
        async for delta in stream:
            ...

Leaving the block ends the request in the engine, whatever the reason. Every stream is reported
exactly once, with one code. All of this runs in one event loop; only the worker has a thread.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from peagle_jax import SamplingParams
from peagle_jax.config import Running
from peagle_jax.cores import num_cores
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.errors import ConfigError, NotReady
from peagle_jax.text.tokenizer import Tokenizer
from serving import caller, request_ids
from serving.admission import Admission, late
from serving.constraints import Constraints
from serving.errors import Code, ServiceError, invalid
from serving.limits import Limits
from serving.memory import MemoryReturn
from serving.messages import (
    Control,
    Death,
    Event,
    Job,
    Listener,
    Load,
    Refused,
    WeightUpdate,
    Worker,
)
from serving.metrics import Metrics
from serving.replies.parser import Replies, Reply
from serving.replies.parts import ReplyParser
from serving.stream import Ask, Stream
from serving.tokenizing import Encoder

_log = logging.getLogger(__name__)
_FEW_CORES = 2
_LONGEST_REFUSAL = 2000
"""Characters of a message about weights, which gRPC sends twice, within 8 KiB of trailers."""
_STOP_SECONDS = 2.0  # for the last round of an engine that serves
_POOL_SECONDS = 1.0  # for texts that are being tokenised when the server stops


class State(enum.Enum):
    """STARTING -> SERVING -> DRAINING -> STOPPED; DEAD from anywhere."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class Frontend:
    """Accepts requests for one engine, from its start to its drain.

    Args:
      worker: runs the engine, in this process or in another one; not yet started.
      name: what clients call the model.
      limits: see `Limits`.
      reply_format: see `Replies`.
      report: called with each stream after its end (logs, traces).
      report_refusal: called with protocol, method and error of each request that is refused.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        name: str,
        limits: Limits | None = None,
        reply_format: str = "auto",
        report: Callable[[Stream], None] = lambda stream: None,
        report_refusal: Callable[[str, str, ServiceError], None] = lambda *refusal: None,
    ):
        engine = worker.description
        self.name = name
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.config = engine.config
        self.target_config = engine.target_config
        self.replies = Replies(self.tokenizer, reply_format, self.target_config.eos_ids)
        self.drafter_config = engine.drafter_config
        self.method = "none" if self.drafter_config is None else self.drafter_config.method
        self.limits = limits or Limits()
        self.admission = Admission(
            self.limits, engine.validate, max_model_len=self.config.max_model_len
        )
        self.memory = MemoryReturn()
        self._encoder = Encoder(
            self.tokenizer, self.limits, max_model_len=self.config.max_model_len, memory=self.memory
        )
        self._constraints = Constraints(worker)
        self.started, self._started = time.time(), time.monotonic()
        self._report, self._report_refusal = report, report_refusal
        self._worker = worker
        self.metrics = Metrics(
            name,
            config=self.config,
            load=lambda: self.load,
            num_open=lambda: self.num_open,
            memory=lambda: worker.device_memory,
        )
        self._numbers = itertools.count()
        self._prepared: list[asyncio.Future] = []
        self._changed = asyncio.Event()
        self.state = State.STARTING
        self.is_stuck = False
        """Whether the engine, or a thread that works on a text, still ran when `drain` ended."""

    @property
    def load(self) -> Load:
        """Load of the engine after its last round."""
        return self._worker.load

    @property
    def batch_sizes_pending(self) -> int:
        """Batch sizes with a program that still compiles; rounds use those that are compiled."""
        return self._worker.batch_sizes_pending

    @property
    def num_open(self) -> int:
        """Requests that this process has accepted and that have not ended."""
        return self.admission.num_open

    @property
    def uptime(self) -> float:
        """Seconds since it was made; a clock that is set does not change them."""
        return time.monotonic() - self._started

    def start(self) -> None:
        """Starts the engine; `state` becomes SERVING when requests can run, see `EngineWorker`."""
        if _has_spare_cores():
            self._prepare()
        self._worker.start(
            Listener(deliver=self._deliver, on_ready=self._serve, on_death=self._die)
        )

    async def change(self, known: State) -> State:
        """Waits until the state differs from `known`, and returns it."""
        while self.state is known:
            await self._changed.wait()
        return self.state

    async def watch(self, seconds: float) -> None:
        """Declares the engine dead when one of its rounds takes longer than `seconds`.

        A device that hangs raises nothing: without this, clients would wait forever. Time does not
        count in which the process of the engine was stopped.
        """
        while self.state in (State.STARTING, State.SERVING, State.DRAINING):
            await asyncio.sleep(min(1.0, seconds / 4))
            if self._worker.busy_seconds > seconds:
                late = f"a round has taken more than {seconds:g} s"
                self._die(Death("TimeoutError", late))

    async def encode(
        self, text: str, *, field: str, deadline: float | None = None, special: bool = True
    ) -> list[int]:
        """See `Encoder.encode`.

        Args:
          deadline: the client's own, as `time.monotonic()`.

        Raises:
          ServiceError: DEADLINE_EXCEEDED too.
        """
        async with self._limit_time(deadline):
            return await self._encoder.encode(text, field=field, special=special)

    async def decode(self, tokens: Sequence[int], *, field: str) -> str:
        """The text of tokens; raises as `encode` does."""
        async with self._limit_time():
            return await self._encoder.decode(tokens, field=field)

    async def names(self, tokens: Sequence[int], *, field: str) -> list[str]:
        """Names of tokens, as reports show them; raises as `encode` does."""
        async with self._limit_time():
            return await self._encoder.names(tokens, field=field)

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        *,
        tools: Sequence[Mapping] = (),
        **fields: str,
    ) -> list[int]:
        """See `Encoder.chat`, whose `field`, `variables_field` and `ending` are `fields`; raises as
        `encode` does.
        """
        async with self._limit_time():
            return await self._encoder.chat(messages, variables, tools=tools, **fields)

    async def constrain(self, ask: Ask, *, is_chat: bool | None = None, address: str = "") -> Ask:
        """The request with its constraint compiled, if it has one.

        Args:
          is_chat: whether the prompt ends where a chat model answers; None: as `ask` says.
          address: see `Constraints.compile`.

        Raises:
          ServiceError: INVALID_ARGUMENT that names the field; RESOURCE_EXHAUSTED;
            DEADLINE_EXCEEDED.
        """
        structured = ask.params.structured
        if structured is None:
            return ask
        self.admission.check_count(ask)  # a matcher is made for each sequence
        has_chat = ask.is_chat if is_chat is None else is_chat
        chat, field = ask.prompt if has_chat else None, ask.spelling.get("structured", "structured")
        async with self._limit_time(ask.deadline):
            matchers = await self._constraints.compile(
                structured, field=field, number=ask.n, chat=chat, address=address
            )
        return replace(ask, matchers=matchers)

    def open(self, ask: Ask) -> Stream:
        """Accepts a request; a refusal by the engine's queue is raised when the stream is read.

        Raises:
          ServiceError: UNAVAILABLE unless the engine serves; INVALID_ARGUMENT, ALREADY_EXISTS and
            DEADLINE_EXCEEDED for requests that cannot run.
        """
        try:
            self._check_state()
            self.admission.check(ask)
            new_parser = self._new_parser(ask)
        except ServiceError as error:
            self.refused(ask.protocol, ask.method, error)
            raise
        number = next(self._numbers)
        stream = Stream(
            ask,
            number,
            new_parser,
            end=self._worker.abort,
            on_close=self._close,
            deadline=self.admission.deadline(ask.arrival, ask.deadline),
        )
        self.admission.add(stream)
        self._worker.submit(jobs_of(ask, number))
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request of the current caller with the finish reason "abort".

        Returns:
          False if the caller runs no request of that id.
        """
        stream = self.admission.find(caller.current(), request_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    async def flush_prefix_cache(self) -> int:
        """Forgets the prefixes of the current caller that no request holds; returns the number of
        pages.

        Raises:
          ServiceError: UNAVAILABLE; the engine does not serve, or stopped serving meanwhile.
        """
        salt = (caller.current(),)
        return await self._answer(lambda answer: self._worker.flush_prefix_cache(salt, answer))

    async def update_weights(
        self, folder: str | None, head: str | None, version: str | None, running: str
    ) -> str:
        """Replaces weights, see `WeightUpdate`; empty texts count as left out. Returns the version.

        Raises:
          ServiceError: as `control`; INVALID_ARGUMENT too if no folder is given, the version is no
            short ASCII text, or `running` is no such way.
        """
        if not (folder or head):
            raise invalid("folder", "give a folder of weights, or one of a head")
        if running not in get_args(Running):
            raise invalid("running", f"must be one of {', '.join(get_args(Running))}")
        name = request_ids.request_id(version, field="version") if version else None
        order = WeightUpdate(
            folder=folder or None, head=head or None, version=name, running=running
        )
        return await self.control(order)

    async def control(self, order: Control) -> str:
        """Carries out an order of a caller with the admin scope; returns the weights' version.

        Raises:
          ServiceError: PERMISSION_DENIED, for any other caller; UNAVAILABLE; INVALID_ARGUMENT, for
            weights that do not fit: the message has a line for each leaf; FAILED_PRECONDITION.
        """
        caller.check_admin()
        answer = await self._answer(lambda answer: self._worker.control(order, answer))
        if isinstance(answer, str):
            _log.info("%s; the weights have version %s", order, answer)
            return answer
        if isinstance(answer, ServiceError):
            raise answer
        code = Code.INTERNAL
        if isinstance(answer, ConfigError):
            code = Code.INVALID_ARGUMENT
        elif isinstance(answer, NotReady):
            code = Code.FAILED_PRECONDITION
        raise ServiceError(code, str(answer), longest=_LONGEST_REFUSAL)

    async def _answer[T](self, ask: Callable[[Callable[[T], object]], None]) -> T:
        """What the engine answers.

        Args:
          ask: asks it; its argument is to be called with the answer.

        Raises:
          ServiceError: UNAVAILABLE; the engine does not serve, or stopped serving meanwhile.
        """
        self._check_state()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ask(lambda value: done.done() or done.set_result(value))
        changed = asyncio.create_task(self.change(self.state))
        try:
            await asyncio.wait({done, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self._check_state()
            return await done
        finally:
            changed.cancel()
            done.cancel()

    def refused(self, protocol: str, method: str, error: ServiceError) -> None:
        """Reports a request that was refused, unless its error has been reported."""
        if not error.is_reported:
            error.is_reported = True
            self.metrics.refused(protocol, error)
            self._report_refusal(protocol, method, error)

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests, lets the open ones end, and stops the engine.

        Returns:
          Whether all ended by themselves within `seconds`; the rest get UNAVAILABLE.
        """
        # Does not wait for an engine that compiles or hangs.
        patience = _STOP_SECONDS if self.state is State.SERVING else 0.0
        if self.state is State.SERVING:  # requests of a paused engine would not end
            self._worker.control("resume", lambda answer: None)
        if self.state is not State.DEAD:
            self._enter(State.DRAINING)
        deadline = time.monotonic() + seconds
        while self.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        rest = self.admission.streams
        for stream in rest:
            stream.fail(
                ServiceError(
                    Code.UNAVAILABLE,
                    f"the server shut down after waiting {seconds:g} s for its requests; "
                    "send this one to another server",
                )
            )
        self._encoder.close()
        self._constraints.close()
        self.memory.close()
        has_stopped = await asyncio.to_thread(self._worker.stop, patience)
        # A thread that outlives the server could still write to its log.
        are_closed = await asyncio.gather(
            self._encoder.wait_closed(_POOL_SECONDS), self._constraints.wait_closed(_POOL_SECONDS)
        )
        self.is_stuck = not (has_stopped and all(are_closed))
        if self.state is not State.DEAD:
            self._enter(State.STOPPED)
        return not rest

    def _new_parser(self, ask: Ask) -> Callable[[], ReplyParser | None]:
        if not ask.wants_text:
            return lambda: None
        return self.replies.parsers(Reply(ask.prompt, ask.is_chat, ask.tools, ask.params))

    def _check_state(self) -> None:
        if self.state is not State.SERVING:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"the engine is {self.state.value}; try again or use another server",
                retry_after=None if self.state is State.DEAD else 1.0,
            )

    @contextlib.asynccontextmanager
    async def _limit_time(self, own: float | None = None) -> AsyncIterator[None]:
        """Ends the work within the block at the deadline of the current request:
        DEADLINE_EXCEEDED.
        """
        deadline = self.admission.deadline(caller.arrival(), own)
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise late(time.monotonic() - caller.arrival()) from error

    def _deliver(self, events: Sequence[Event], num_tokens: int) -> None:
        for event in events:
            if isinstance(event, Refused):
                if stream := self.admission.get(event.keys[0][0]):
                    stream.fail(self._refusal(event.error))
            elif stream := self.admission.get(event.key[0]):
                stream.push(event.key[1], event)
                if event.request is not None and event.request.error is not None:
                    code = Code.INTERNAL
                    if event.request.error_is_the_clients:
                        code = Code.INVALID_ARGUMENT
                    stream.fail(ServiceError(code, event.request.error))
        self.metrics.round(events, num_tokens)

    def _refusal(self, error: Exception) -> ServiceError:
        if isinstance(error, QueueFull):
            return ServiceError(
                Code.RESOURCE_EXHAUSTED,
                f"the queue is full: {error}",
                retry_after=self.metrics.seconds_per_request(),
            )
        return ServiceError(Code.INVALID_ARGUMENT, str(error))

    def _close(self, stream: Stream) -> None:
        self.admission.remove(stream)
        self.metrics.ended(stream)
        self._report(stream)

    def _die(self, death: Death) -> None:
        _log.error("the engine is dead: %s", death.text)
        self._enter(State.DEAD)
        for stream in self.admission.streams:
            stream.fail(
                ServiceError(
                    Code.INTERNAL, f"the engine died ({death.kind}); the server's log says why"
                )
            )

    def _serve(self) -> None:
        self._enter(State.SERVING)
        if self.state is State.SERVING and not self._prepared:
            self._prepare()

    def _prepare(self) -> None:
        """Begins what takes seconds and the first chat or constraint would wait for: it imports,
        and reads a vocabulary.

        With few cores it would delay the first programs, and begins once the engine serves.
        """
        self._prepared += [self._encoder.prepare(), self._constraints.prepare()]
        for one in self._prepared:  # a server that ends before needs neither
            one.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def prepared(self) -> None:
        """Waits until chats and constraints need nothing more that takes seconds."""
        while not self._prepared and self.state is State.STARTING:
            await self.change(State.STARTING)
        await asyncio.gather(*self._prepared, return_exceptions=True)

    def _enter(self, state: State) -> None:
        if self.state is State.DRAINING and state is State.SERVING:
            return  # the server was stopped while it compiled
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()


def _has_spare_cores() -> bool:
    return num_cores() > _FEW_CORES


def jobs_of(ask: Ask, number: int) -> list[Job]:
    """One job for each sequence; its key is `number` and its place among them."""
    # A caller cannot measure by time what others have asked for.
    salt = ask.caller, ask.cache_salt
    matchers = ask.matchers or [None] * ask.n
    return [
        Job((number, i), ask.prompt, _numbered(ask.params, i), salt, ask.priority, matchers[i])
        for i in range(ask.n)
    ]


def _numbered(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of sequence `index` of a request: sequence 0 has the client's seed, others have
    their own.
    """
    if index == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)
