"""A server within the test's process, its event loop in a thread; clients use TCP."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import httpx
import openai

from peagle_jax import Engine
from serving.frontend import Frontend, State
from serving.http.server import HttpServer
from serving.limits import Limits
from serving.protos import peagle_v1_pb2_grpc
from serving.rpc.server import RpcServer
from serving.worker import EngineWorker
from tests.waiting import LIMIT, eventually

_OF_BOTH = ("tokens", "certificates", "max_message_bytes")


class Pace:
    """Rounds of decoding that a test releases one by one.

    Attributes:
      is_waiting: set while the engine's thread waits for the next round to be released.
    """

    def __init__(self):
        self.is_waiting = threading.Event()
        self._permits = threading.Semaphore(0)

    def release(self, rounds: int) -> None:
        """Lets the engine begin so many more rounds."""
        self._permits.release(rounds)

    def wait(self) -> None:
        """Called by the engine's thread before each round."""
        self.is_waiting.set()
        if not self._permits.acquire(timeout=LIMIT):
            raise TimeoutError("the test released no further round")
        self.is_waiting.clear()


class LiveServer:
    """Serves `engine` until it is closed.

    Args:
      engine: not yet warm.
      name, limits, report, reply_format: as `Frontend` takes them.
      http: whether to serve HTTP too.
      options: as `RpcServer` and `HttpServer` take them.

    Attributes:
      frontend: touch it in the server's loop only, through `call` or `run`.
      address: "127.0.0.1:port" of gRPC.
      http_address: the same of HTTP.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "tiny",
        limits: Limits | None = None,
        report=lambda stream: None,
        reply_format: str = "auto",
        http: bool = False,
        **options,
    ):
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.http: HttpServer | None = None
        own = dict(name=name, limits=limits, report=report, reply_format=reply_format)
        self.run(self._start(own, http, options))

    async def _start(self, frontend_options: dict, http: bool, options: dict) -> None:
        self.frontend = Frontend(EngineWorker(self.engine), **frontend_options)
        self.server = RpcServer(self.frontend, **options)
        port = await self.server.start("127.0.0.1", 0)
        self.address = f"127.0.0.1:{port}"
        if http:
            both = {name: options[name] for name in _OF_BOTH if name in options}
            self.http = HttpServer(self.frontend, **both)
            self.http_address = f"127.0.0.1:{await self.http.start('127.0.0.1', 0)}"
        self.frontend.start()
        state = await self.frontend.change(State.STARTING)
        self.server.show(state)

    def run(self, work: Coroutine, timeout: float = LIMIT) -> Any:
        """Runs a coroutine in the server's loop and returns what it does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    @contextlib.contextmanager
    def another_http(self, **options) -> Iterator[str]:
        """The address of a further HTTP server over the same frontend."""

        async def start() -> tuple[HttpServer, int]:
            server = HttpServer(self.frontend, **options)
            return server, await server.start("127.0.0.1", 0)

        server, port = self.run(start())
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.run(server.stop(0.5))

    @contextlib.contextmanager
    def another_client(self, **options) -> Iterator[httpx.Client]:
        """A client of a further HTTP server, see `another_http`."""
        another = self.another_http(**options)
        with (
            another as address,
            httpx.Client(base_url=f"http://{address}", timeout=LIMIT) as client,
        ):
            yield client

    def call(self, function, *args) -> Any:
        """Calls a function in the server's loop."""

        async def call():
            return function(*args)

        return self.run(call())

    @contextlib.contextmanager
    def paced(self) -> Iterator[Pace]:
        """Within the block a round of decoding begins only when the test releases it.

        A request yields its first token after one released round, because a prefill's result is
        read while the next round runs.
        """
        pace = Pace()
        with self._before_rounds(pace.wait):
            try:
                yield pace
            finally:
                pace.release(1_000_000)

    def unmerged(self) -> contextlib.AbstractContextManager:
        """Within the block a round begins once all streams were read: no deltas merge."""

        def all_read() -> bool:
            streams = self.frontend.admission.streams
            return not any(one.has_news for stream in streams for one in stream._sequences)

        return self._before_rounds(lambda: eventually(lambda: self.call(all_read)))

    @contextlib.contextmanager
    def _before_rounds(self, wait: Callable[[], object]) -> Iterator[None]:
        programs = self.engine.programs
        healthy = programs.round

        def late(*args):
            wait()
            return healthy(*args)

        programs.round = late
        try:
            yield
        finally:
            programs.round = healthy

    def check_freed(self, pace: Pace) -> None:
        """Fails unless all requests end, and the engine frees what they held within two rounds."""
        eventually(lambda: self.frontend.num_open == 0, "all requests have ended")
        pace.release(2)
        self.check_empty()

    def check_empty(self) -> None:
        """Fails unless every request ends and every page becomes free."""

        def is_empty() -> bool:
            load = self.frontend.load
            return not (
                self.frontend.num_open or load.num_running or load.num_waiting or load.pages_used
            )

        eventually(lambda: self.call(is_empty), "the server is empty")
        self.engine.scheduler.check_integrity()

    @contextlib.contextmanager
    def peagle(self) -> Iterator[peagle_v1_pb2_grpc.GenerationStub]:
        """A stub of a connection of its own."""
        with grpc.insecure_channel(self.address) as channel:
            yield peagle_v1_pb2_grpc.GenerationStub(channel)

    def client(self) -> httpx.Client:
        """A client of the HTTP port."""
        return httpx.Client(base_url=f"http://{self.http_address}", timeout=LIMIT)

    def openai(self) -> openai.OpenAI:
        """OpenAI's client of the HTTP port."""
        url = f"http://{self.http_address}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT)

    def post(self, path: str, **body: object) -> httpx.Response:
        """The answer to a request of a connection of its own."""
        return httpx.post(f"http://{self.http_address}{path}", json=body, timeout=LIMIT)

    def __enter__(self) -> "LiveServer":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Drains and stops everything."""

        async def stop():
            await self.frontend.drain(1.0)
            await self.server.stop(0.5)
            if self.http is not None:
                await self.http.stop(0.5)

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)
        self._loop.close()
