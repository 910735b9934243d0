"""A server within the test's process: its event loop runs in a thread, clients talk to it over TCP."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from peagle_jax import Engine
from serving.frontend import Frontend, State
from serving.http.server import HttpServer
from serving.limits import Limits
from serving.rpc.server import RpcServer

_OF_BOTH = ("tokens", "certificates", "max_message_bytes")


class LiveServer:
    """Serves `engine` until it is closed.

    Args:
      engine: not yet warm.
      name, limits, report: as `Frontend` takes them.
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
        http: bool = False,
        **options,
    ):
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.http: HttpServer | None = None
        self.run(self._start(dict(name=name, limits=limits, report=report), http, options))

    async def _start(self, frontend_options: dict, http: bool, options: dict) -> None:
        self.frontend = Frontend(self.engine, **frontend_options)
        self.server = RpcServer(self.frontend, **options)
        port = await self.server.start("127.0.0.1", 0)
        self.address = f"127.0.0.1:{port}"
        if http:
            both = {name: options[name] for name in _OF_BOTH if name in options}
            self.http = HttpServer(self.frontend, **both)
            self.http_address = f"127.0.0.1:{await self.http.start('127.0.0.1', 0)}"
        self.frontend.start()
        state = await self.frontend.change(State.STARTING)
        await self.server.show(state)

    def run(self, work: Coroutine, timeout: float = 120.0) -> Any:
        """Runs a coroutine in the server's loop and returns what it does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    @contextlib.contextmanager
    def another_http(self, **options) -> Iterator[str]:
        """The address of a further HTTP server over the same frontend; options as `HttpServer` takes them."""

        async def start() -> tuple[HttpServer, int]:
            server = HttpServer(self.frontend, **options)
            return server, await server.start("127.0.0.1", 0)

        server, port = self.run(start())
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.run(server.stop(0.5))

    def call(self, function, *args) -> Any:
        """Calls a function in the server's loop."""

        async def call():
            return function(*args)

        return self.run(call())

    def slowed(self, seconds: float) -> contextlib.AbstractContextManager:
        """Within the block each round of decoding takes longer: what a test must find running still runs."""
        return self._before_rounds(lambda: time.sleep(seconds))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within the block no round of decoding begins: requests come, and none ends."""
        released = threading.Event()
        with self._before_rounds(released.wait):
            try:
                yield
            finally:
                released.set()

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

    def check_empty(self) -> None:
        """Fails unless every request has ended and every page is free."""

        async def settle():
            for _ in range(500):
                load = self.frontend.load
                if not (self.frontend.num_open or load.num_running or load.num_waiting):
                    break
                await asyncio.sleep(0.01)
            assert self.frontend.num_open == 0
            assert (self.frontend.load.num_running, self.frontend.load.num_waiting) == (0, 0)
            assert self.frontend.load.pages_used == 0

        self.run(settle())
        self.engine.scheduler.check_integrity()

    def close(self) -> None:
        """Drains and stops everything."""

        async def stop():
            await self.frontend.drain(1.0)
            await self.server.stop(0.5)
            if self.http is not None:
                await self.http.stop(0.5)

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
