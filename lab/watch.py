"""Monitors a server under attack: latencies of honest clients, and resources of the server's
process."""

import asyncio
import contextlib
import os
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.served import Served, cpu_seconds, stat_fields
from lab.raw_connections import Address, connected, head, status
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub

INTERVAL = 0.05  # seconds between two probes
_LONGEST = 120.0  # seconds that a probe waits for its answer
_GET_HEALTH = head("GET", "/health", [("Connection", "close")])


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The server's process at one moment: seconds, bytes, and seconds of each thread by its id."""

    time: float
    cpu_seconds: float
    threads: dict[int, tuple[str, float]]
    resident_bytes: int
    log_bytes: int
    num_descriptors: int

    @classmethod
    def of(cls, server: Served) -> "Snapshot":
        """Now."""
        pid = server.process.pid
        return cls(
            time=time.perf_counter(),
            cpu_seconds=cpu_seconds(stat_fields(Path(f"/proc/{pid}/stat"))),
            threads=_threads(pid),
            resident_bytes=resident_bytes(pid),
            log_bytes=server.log.stat().st_size,
            num_descriptors=num_descriptors(pid),
        )


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    """Files and connections that a process holds open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _threads(pid: int) -> dict[int, tuple[str, float]]:
    """Name and processor time of each thread, by its id; the first thread's is the process's."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name = (folder / "comm").read_text().strip()
            found[int(folder.name)] = name, cpu_seconds(stat_fields(folder / "stat"))
    return found


@dataclass
class Spans:
    """Time spans: finished ones as (begin, end), and the begin of the unfinished one."""

    done: list[tuple[float, float]] = field(default_factory=list)
    open: float | None = None

    def begin(self) -> None:
        self.open = time.perf_counter()

    def end(self) -> None:
        self.done.append((self.open, time.perf_counter()))
        self.open = None

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds of all that began before `end` and ended after `begin`, in order."""
        pending = [] if self.open is None else [(self.open, time.perf_counter())]
        return [b - a for a, b in (*self.done, *pending) if a < end and b > begin]


def figures(seconds: Sequence[float], *, interval: float | None = None) -> dict[str, float]:
    """p50, p99 and maximum in milliseconds; zeros if there are none.

    Args:
      interval: seconds between two probes. A slow answer then counts for all the probes that would
        have been sent meanwhile, each with the rest of the wait.
    """
    values: list[float] = []
    for value in seconds:
        values.append(value)
        while interval is not None and (value := value - interval) > 0:
            values.append(value)
    found = np.percentile(values, [50, 99, 100]) if values else [0.0, 0.0, 0.0]
    return {name: 1e3 * float(ms) for name, ms in zip(("p50", "p99", "max"), found, strict=True)}


class Watch:
    """Clients that probe health and read a stream, until the block ends.

    Args:
      server: serves HTTP too.
      token: bearer token of the stream's client.
      request_id: of each of its requests.
      max_tokens: of each of its requests.
      ca: file of the authority that signed the server's certificate; None if it speaks no TLS.

    Attributes:
      health, rpc_health: one span a probe of `/health` (each on a connection of its own) and of
        `grpc.health.v1`.
      gaps: one span between two messages of a stream.
      lateness: of each probe of `/health`, when it was due and how late this process woke up for
        it, because of other work on the machine.
      failures: time and reason of each probe without an answer.
      texts: token ids of each stream that ended or was cut off, and its status.
    """

    def __init__(
        self,
        server: Served,
        *,
        token: str,
        request_id: str,
        max_tokens: int = 200,
        ca: Path | None = None,
    ):
        self._server, self._ca = server, ca
        tls = None if ca is None else ssl.create_default_context(cafile=ca)
        self._http = Address.of(server.http_address, tls)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._request = pb.GenerateRequest(
            request_id=request_id,
            tokens=pb.TokenIds(ids=[5, 6, 7, 8]),
            stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
        )
        self.health, self.rpc_health, self.gaps = Spans(), Spans(), Spans()
        self.lateness: list[tuple[float, float]] = []
        self.failures: list[tuple[float, str]] = []
        self.texts: deque[tuple[list[int], str]] = deque(maxlen=1000)
        self.peak_bytes = self.peak_descriptors = 0
        self.num_tokens = 0

    async def __aenter__(self) -> Self:
        self._channel = self._connect()
        await self._channel.channel_ready()
        checker = health_pb2_grpc.HealthStub(self._channel)
        check = lambda: checker.Check(health_pb2.HealthCheckRequest(), timeout=_LONGEST)
        self._tasks = [
            asyncio.create_task(one)
            for one in (
                self._probe(self.health, self._ask_health, self.lateness),
                self._probe(self.rpc_health, check, []),
                self._read_streams(GenerationStub(self._channel)),
                self._sample(),
            )
        ]
        return self

    async def __aexit__(self, *error) -> None:
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        for one in found:
            if isinstance(one, Exception) and error[0] is None:
                raise one

    def _connect(self) -> grpc.aio.Channel:
        if self._ca is None:
            return grpc.aio.insecure_channel(self._server.address)
        credentials = grpc.ssl_channel_credentials(self._ca.read_bytes())
        return grpc.aio.secure_channel(self._server.address, credentials)

    async def _probe(
        self, spans: Spans, ask: Callable[[], Awaitable], lateness: list[tuple[float, float]]
    ) -> None:
        due = time.perf_counter()
        while True:
            lateness.append((due, time.perf_counter() - due))
            spans.begin()
            try:
                await ask()
            except (OSError, grpc.aio.AioRpcError, TimeoutError) as error:
                self.failures.append((time.perf_counter(), _reason(error)))
            spans.end()
            now = time.perf_counter()
            due = max(due + INTERVAL, now)
            await asyncio.sleep(due - now)

    async def _ask_health(self) -> None:
        async with asyncio.timeout(_LONGEST), connected(self._http) as (reader, writer):
            writer.write(_GET_HEALTH)
            if (found := await status(reader)) != "200":
                raise OSError(f"/health: {found}")

    async def _read_streams(self, stub: GenerationStub) -> None:
        while True:
            tokens: list[int] = []
            code = "OK"
            try:
                async for delta in stub.Generate(self._request, metadata=self._metadata):
                    if self.gaps.open is not None:
                        self.gaps.end()
                    self.gaps.begin()
                    tokens.extend(delta.token_ids)
                    self.num_tokens += len(delta.token_ids)
                    if delta.finish.reason == pb.FINISH_REASON_ABORT:
                        code = "aborted by another"
            except grpc.aio.AioRpcError as error:
                code = error.code().name
                await asyncio.sleep(INTERVAL)
            self.gaps.open = None
            self.texts.append((tokens, code))

    async def _sample(self) -> None:
        pid = self._server.process.pid
        while True:
            with contextlib.suppress(OSError):
                self.peak_bytes = max(self.peak_bytes, resident_bytes(pid))
                self.peak_descriptors = max(self.peak_descriptors, num_descriptors(pid))
            await asyncio.sleep(INTERVAL)

    def seen(self, *windows: tuple[float, float]) -> dict:
        """Latencies of the clients within some windows, each between two moments of
        `time.perf_counter`."""
        within = lambda spans: [x for window in windows for x in spans.between(*window)]
        is_in = lambda moment: any(begin <= moment <= end for begin, end in windows)
        return {
            "health_ms": figures(within(self.health), interval=INTERVAL),
            "rpc_health_ms": figures(within(self.rpc_health), interval=INTERVAL),
            "gap_ms": figures(within(self.gaps)),
            "prober_late_ms": figures([late for due, late in self.lateness if is_in(due)]),
            "probes": sum(len(within(spans)) for spans in (self.health, self.rpc_health)),
            "probes_failed": sum(is_in(moment) for moment, _ in self.failures),
        }

    def check_texts(self) -> tuple[int, int]:
        """(streams that ended early, streams whose tokens differ from the first whole one's)."""
        whole = [tokens for tokens, code in self.texts if code == "OK"]
        cut = sum(code != "OK" for _, code in self.texts)
        differ = sum(tokens != whole[0][: len(tokens)] for tokens, _ in self.texts if whole)
        return cut, differ


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name
    return str(error) or type(error).__name__
