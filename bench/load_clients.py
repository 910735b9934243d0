"""Clients of a load test: processes that send requests by gRPC or HTTP and note when each message
arrives.

Nothing here imports jax, so that a process starts soon.
"""

import asyncio
import itertools
import json
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Literal, Self

import grpc

from bench.latency import Outcome
from peagle_jax.config import ConfigError
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub

Protocol = Literal["grpc", "http"]
PROTOCOLS: tuple[Protocol, ...] = ("grpc", "http")
_CHANNEL = [("grpc.max_receive_message_length", -1)]
_POLL = 1.0  # seconds between two calls of `on_second`
_USAGE = re.compile(rb'"usage": ?{')  # null in all chunks but the last
_LOST = "LOST"  # status of a request whose connection ended
_GONE = (_LOST, "UNAVAILABLE")  # statuses of a server that has ended


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to make.

    Args:
      start: seconds after the beginning; None starts the call as soon as a client is free.
      cancel_after: tokens after which the client cancels the call; None never cancels. gRPC only.
      deadline: in seconds; None for no deadline. gRPC only.
    """

    request: pb.GenerateRequest
    start: float | None = None
    cancel_after: int | None = None
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does.

    Args:
      clients: number of clients, each with one call after the other; None starts every call at its
        `start`, without a limit.
      seconds: repeat the calls, and begin none after this time; None makes each call once.
    """

    address: str
    protocol: Protocol
    todo: Sequence[Call]
    clients: int | None
    seconds: float | None = None


@dataclass(kw_only=True)
class Loaded:
    """Outcomes in the order of the calls, or with a limit of time in any order.

    `begin` is `time.perf_counter()`, `seconds` the time from there to the last end, `cpu_seconds`
    that of all clients.
    """

    begin: float
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class Clients:
    """Client processes, which end with the block.

    Args:
      most: most processes; a load never has more than clients.
    """

    def __init__(self, most: int):
        self._pipes: list[Connection] = []
        self._most = most

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends its process

    def load(
        self,
        todo: Sequence[Call],
        *,
        address: str,
        concurrency: int | None,
        protocol: Protocol = "grpc",
        seconds: float | None = None,
        on_done: Callable[[], object] = lambda: None,
        on_second: Callable[[], object] = lambda: None,
    ) -> Loaded:
        """Makes all calls and waits for their ends; arguments as in `Work`.

        Args:
          on_done: called after each call.
          on_second: called once a second.
        Raises:
          ConfigError: a client process failed.
        """
        count = max(1, min(self._most, len(todo) if concurrency is None else concurrency))
        self._start(count)
        owner = lambda number: number % (concurrency or count) % count
        shares = [[i for i in range(len(todo)) if owner(i) == place] for place in range(count)]
        pipes = dict(zip(self._pipes, shares, strict=False))
        for place, (pipe, share) in enumerate(pipes.items()):
            clients = None if concurrency is None else len(range(place, concurrency, count))
            calls = [todo[number] for number in share]
            ways = dict(address=address, protocol=protocol)
            pipe.send(Work(**ways, todo=calls, clients=clients, seconds=seconds))
        for pipe in pipes:
            _received(pipe)  # it has connected
        loaded = Loaded(begin=time.perf_counter())
        for pipe in pipes:
            pipe.send(loaded.begin)
        by_number: dict[int, Outcome] = {}
        left = set(pipes)
        while left:
            ready = wait(left, timeout=_POLL)
            on_second()
            for pipe in ready:
                if (message := _received(pipe)) is None:
                    on_done()
                    continue
                left.remove(pipe)
                outcomes, end, cpu_seconds = message
                if seconds is None:
                    by_number |= zip(pipes[pipe], outcomes, strict=True)
                else:
                    loaded.outcomes += outcomes
                loaded.seconds = max(loaded.seconds, end - loaded.begin)
                loaded.cpu_seconds += cpu_seconds
        loaded.outcomes += [by_number[number] for number in sorted(by_number)]
        return loaded

    def _start(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        while len(self._pipes) < count:
            ours, theirs = spawn.Pipe()
            spawn.Process(target=_work_on, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)


def _received(pipe: Connection):
    try:
        message = pipe.recv()
    except EOFError as error:
        raise ConfigError("a client process ended before its requests") from error
    if isinstance(message, Exception):
        raise ConfigError(f"a client process failed: {message!r}") from message
    return message


# The functions below run in the client processes.


def _work_on(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    while True:
        try:
            work = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(asyncio.run(_load(work, pipe)))
        except BrokenPipeError:
            return
        except Exception as error:  # the first process reports it
            pipe.send(error)


async def _load(work: Work, pipe: Connection) -> tuple[list[Outcome], float, float]:
    """Outcomes, the time of the last end, and processor time."""
    async with grpc.aio.insecure_channel(work.address, options=_CHANNEL) as channel:
        stub = GenerationStub(channel)
        if work.protocol == "grpc":
            await channel.channel_ready()
        pipe.send("connected")
        begin, cpu = await asyncio.to_thread(pipe.recv), time.process_time()
        outcomes: list[Outcome | None] = [None] * len(work.todo)

        async def make(index: int, connection: "_HttpConnection | None" = None) -> Outcome:
            call = work.todo[index]
            if call.start is not None:
                await asyncio.sleep(max(0.0, begin + call.start - time.perf_counter()))
            if work.protocol == "grpc":
                outcome = await _call(stub, call)
            else:
                outcome = await (connection or _HttpConnection(work.address)).call(call)
            if work.seconds is None:
                outcomes[index] = outcome
            else:
                outcomes.append(outcome)
            pipe.send(None)
            return outcome

        async def client(numbers: Iterator[int]) -> None:
            connection = _HttpConnection(work.address)
            for index in numbers:
                if work.seconds is not None and time.perf_counter() > begin + work.seconds:
                    return
                outcome = await make(index, connection)
                if work.seconds is not None and outcome.code in _GONE:
                    return

        numbers = iter(range(len(work.todo)))
        if work.seconds is not None:
            numbers, outcomes = itertools.cycle(numbers), []
        async with asyncio.TaskGroup() as group:
            if work.clients is None:
                for index in numbers:
                    group.create_task(make(index))
            else:
                for _ in range(work.clients):
                    group.create_task(client(numbers))
        return outcomes, time.perf_counter(), time.process_time() - cpu


async def _call(stub: GenerationStub, call: Call) -> Outcome:
    outcome = Outcome(sent=time.perf_counter())
    rpc = stub.Generate(call.request, timeout=call.deadline)
    limit = call.cancel_after
    try:
        if limit == 0:
            rpc.cancel()
        async for delta in rpc:
            if delta.token_ids:
                outcome.arrive(time.perf_counter())
                outcome.tokens.extend(delta.token_ids)
            if delta.HasField("usage"):
                outcome.acceptance = delta.usage.acceptance
            if limit is not None and len(outcome.tokens) >= limit:
                rpc.cancel()
    except grpc.RpcError:
        pass  # the status code below is the result
    except asyncio.CancelledError:
        if not rpc.cancelled():  # this task is cancelled, not the call
            raise
    outcome.code = (await rpc.code()).name
    return outcome


def http_body(request: pb.GenerateRequest) -> bytes:
    """A streaming request of /v1/completions that asks for the same as a request of gRPC."""
    is_text = request.WhichOneof("prompt") == "text"
    return json.dumps(
        {
            "prompt": request.text if is_text else list(request.tokens.ids),
            "max_tokens": request.stopping.max_tokens,
            "ignore_eos": request.stopping.ignore_eos,
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": _has_token_ids(request),
        }
    ).encode()


def _has_token_ids(request: pb.GenerateRequest) -> bool:
    """Greedy texts are compared by their tokens, so their events are parsed."""
    return request.sampling.temperature == 0 and request.WhichOneof("prompt") == "tokens"


class _HttpConnection(asyncio.Protocol):
    """A kept connection with one streamed answer after the other.

    Only the last event is parsed, and those with token ids: the client must cost less than the
    server. Events are expected as peagle-serve writes them, each within one chunk.
    """

    def __init__(self, address: str):
        self._address = address
        self._transport: asyncio.Transport | None = None

    async def call(self, call: Call) -> Outcome:
        """Makes a request and waits for its end."""
        loop = asyncio.get_running_loop()
        body = http_body(call.request)
        self._outcome = Outcome(sent=time.perf_counter())
        self._reads_ids = _has_token_ids(call.request)
        self._buffer, self._has_head, self._ended = b"", False, loop.create_future()
        if self._transport is None:
            host, _, port = self._address.rpartition(":")
            try:
                self._transport, _ = await loop.create_connection(lambda: self, host, int(port))
            except OSError:
                self._outcome.code = _LOST
                return self._outcome
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await self._ended
        return self._outcome

    def data_received(self, data: bytes) -> None:
        now, outcome = time.perf_counter(), self._outcome
        self._buffer += data
        if not self._has_head:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            if (status := head[9:12]) != b"200":
                outcome.code = f"HTTP {status.decode()}"
                self._transport.close()
                return
            self._has_head, self._buffer = True, rest
        *events, self._buffer = self._buffer.split(b"\n\n")
        has_tokens = False
        for event in events:
            content = event.partition(b"data: ")[2]
            if content == b"[DONE]":
                outcome.code = outcome.code or "OK"
            elif content.startswith(b'{"error"'):
                outcome.code = "ERROR"
            elif _USAGE.search(content):
                _read_usage(outcome, json.loads(content))
            else:
                has_tokens = True
                if self._reads_ids:
                    outcome.tokens.extend(json.loads(content)["choices"][0]["token_ids"])
        if has_tokens:
            outcome.arrive(now)
        if self._buffer.endswith(b"0\r\n\r\n") and not self._ended.done():
            outcome.code = outcome.code or _LOST
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._ended.done():
            self._outcome.code = self._outcome.code or _LOST
            self._ended.set_result(None)


def _read_usage(outcome: Outcome, event: dict) -> None:
    outcome.counted = event["usage"]["completion_tokens"]
    block = event.get("metrics", {}).get("speculative_decoding")
    if block is not None:
        rounds = block["num_spec_steps"]
        outcome.acceptance = pb.Acceptance(
            rounds=rounds,
            emitted=round(rounds * block["mean_acceptance_length"]),
            drafted=block["num_draft_tokens"],
            accepted=block["num_accepted_draft_tokens"],
        )
