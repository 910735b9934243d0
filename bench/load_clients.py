"""Clients of a load test: processes that send requests by gRPC or HTTP and note when each message
arrives; and the latencies that they saw.

Nothing here imports jax, so that a process starts soon.
"""

import asyncio
import itertools
import json
import multiprocessing
import re
import signal
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Literal, Self

import grpc
import numpy as np

from peagle_jax.config import ConfigError
from peagle_jax.engine.host.stats import Acceptance
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub

Protocol = Literal["grpc", "http"]
_CHANNEL = [("grpc.max_receive_message_length", -1)]
_USAGE = re.compile(rb'"usage": ?{')  # null in all chunks but the last
_LOST = "LOST"  # status of a request whose connection ended
_GONE = _LOST, "UNAVAILABLE"  # after which a client ends: the server may have gone
_PERCENTILES = (50, 90, 99)


@dataclass(kw_only=True)
class Outcome:
    """One request. Times are `time.perf_counter()`; `first` and `last` are arrivals of tokens.

    `code` is its final gRPC status. `acceptance` comes from the server's usage, which only a
    complete stream contains. `counted` is the server's number of tokens where their ids are not
    sent. `arrivals` are those of all messages with tokens.
    """

    sent: float
    code: str = ""
    first: float | None = None
    last: float | None = None
    tokens: Sequence[int] = field(default_factory=lambda: array("i"))
    counted: int | None = None
    arrivals: array = field(default_factory=lambda: array("d"))
    acceptance: pb.Acceptance | None = None

    def arrive(self, now: float) -> None:
        """Notes a message with tokens."""
        self.first = self.first or now
        self.last = now
        self.arrivals.append(now)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.counted is None else self.counted

    def latency(self, name: str) -> float | None:
        """Milliseconds of "ttft", "tpot" or "e2e"; None if undefined.

        With speculation several tokens arrive per message, so time per output token counts tokens,
        not messages: (e2e - ttft) / (tokens - 1).
        """
        if self.first is None:
            return None
        if name == "tpot":
            rest = self.num_tokens - 1
            return 1e3 * (self.last - self.first) / rest if rest > 0 else None
        return 1e3 * ((self.first if name == "ttft" else self.last) - self.sent)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 90th and 99th percentile, as "p50" and so on; None without values."""
    if not values:
        return None
    found = np.percentile(values, _PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(_PERCENTILES, found, strict=True)}


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict:
    """The result fields of a row; latencies are of successful requests.

    Args:
      seconds: wall time from the first request to the last end.
    """
    good = [outcome for outcome in outcomes if outcome.code == "OK"]
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    counts = Acceptance.of(o.acceptance for o in outcomes if o.acceptance is not None)
    row = {
        "requests": len(outcomes),
        "codes": dict(sorted(Counter(outcome.code for outcome in outcomes).items())),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
    }
    for name in ("ttft", "tpot", "e2e"):
        values = [outcome.latency(name) for outcome in good]
        row[f"{name}_ms"] = percentiles([value for value in values if value is not None])
    return row | counts.as_row()


def gap_figures(outcomes: Sequence[Outcome], begin: float) -> dict:
    """Row fields about the milliseconds between two messages of a stream, over all streams.

    `gap_max_at` is the end of the longest one in seconds after `begin`, which is
    `time.perf_counter()`. Without two messages of one stream all are None.
    """
    gaps = [np.diff(np.asarray(outcome.arrivals)) for outcome in outcomes]
    ends = [np.asarray(outcome.arrivals)[1:] for outcome in outcomes]
    if not (some := 1e3 * np.concatenate([np.zeros(0), *gaps])).size:
        return {"gap_ms": None, "gap_max_at": None}
    longest = int(some.argmax())
    p50, p99 = np.percentile(some, (50, 99))
    return {
        "gap_ms": {"p50": float(p50), "p99": float(p99), "max": float(some[longest])},
        "gap_max_at": float(np.concatenate(ends)[longest] - begin),
    }


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to make.

    Args:
      start: seconds after the beginning; None starts the call as soon as a client is free.
    """

    request: pb.GenerateRequest
    start: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does.

    Args:
      clients: number of clients, each with one call after the other; None starts every call at its
        `start`, without a limit.
      seconds: clients make the calls again and again, and begin none after this time.
    """

    address: str
    protocol: Protocol
    todo: Sequence[Call]
    clients: int | None
    seconds: float | None = None


@dataclass(kw_only=True)
class Loaded:
    """Outcomes in the order of the calls; those of a load for some seconds in any order.

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
    ) -> Loaded:
        """Makes all calls and waits for their ends; arguments as in `Work`.

        Args:
          on_done: called after each call.
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
            ways = dict(address=address, protocol=protocol, seconds=seconds)
            pipe.send(Work(**ways, todo=calls, clients=clients))
        for pipe in pipes:
            _received(pipe)  # it has connected
        loaded = Loaded(begin=time.perf_counter())
        for pipe in pipes:
            pipe.send(loaded.begin)
        by_number: dict[int, Outcome] = {}
        left = set(pipes)
        while left:
            for pipe in wait(left):
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
        outcomes: dict[int, Outcome] = {}  # by number of the call

        async def make(index: int, connection: "_HttpConnection | None" = None) -> str:
            call = work.todo[index % len(work.todo)]
            if call.start is not None:
                await asyncio.sleep(max(0.0, begin + call.start - time.perf_counter()))
            if work.protocol == "grpc":
                outcomes[index] = await _call(stub, call)
            else:
                connection = connection or _HttpConnection(work.address)
                outcomes[index] = await connection.call(call)
            pipe.send(None)
            return outcomes[index].code

        async def client(numbers: Iterator[int]) -> None:
            connection = _HttpConnection(work.address)
            for index in numbers:
                if time.perf_counter() > end or await make(index, connection) in _GONE:
                    return

        end = float("inf") if work.seconds is None else begin + work.seconds
        numbers = iter(range(len(work.todo))) if work.seconds is None else itertools.count()
        async with asyncio.TaskGroup() as group:
            if work.clients is None:
                for index in numbers:
                    group.create_task(make(index))
            else:
                for _ in range(work.clients):
                    group.create_task(client(numbers))
        ordered = [outcomes[number] for number in sorted(outcomes)]
        return ordered, time.perf_counter(), time.process_time() - cpu


async def _call(stub: GenerationStub, call: Call) -> Outcome:
    outcome = Outcome(sent=time.perf_counter())
    rpc = stub.Generate(call.request)
    try:
        async for delta in rpc:
            if delta.token_ids:
                outcome.arrive(time.perf_counter())
                outcome.tokens.extend(delta.token_ids)
            if delta.HasField("usage"):
                outcome.acceptance = delta.usage.acceptance
    except grpc.RpcError:
        pass  # the status code below is the result
    outcome.code = (await rpc.code()).name
    return outcome


def http_body(request: pb.GenerateRequest) -> bytes:
    """A streaming request of /v1/completions that asks for the same as a request of gRPC."""
    return json.dumps(
        {
            "prompt": list(request.tokens.ids),
            "max_tokens": request.stopping.max_tokens,
            "ignore_eos": request.stopping.ignore_eos,
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": _is_greedy(request),
        }
    ).encode()


def _is_greedy(request: pb.GenerateRequest) -> bool:
    """Greedy texts are compared by their tokens, so their events are parsed."""
    return request.sampling.temperature == 0


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
        self._reads_ids = _is_greedy(call.request)
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
