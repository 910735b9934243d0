"""Builds the part of the server that clients talk to from its settings, runs it, and drains it. No
jax here.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from peagle_jax.cli.model_folders import embedded
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.options import options_of
from peagle_jax.text.tokenizer import Tokenizer
from serving.access import RESERVE, Access
from serving.engine_child import EngineChild
from serving.frames import ClosedError
from serving.frontend import Frontend, State
from serving.http.connection import TimeLimits
from serving.http.gate import Gate
from serving.http.server import HttpServer
from serving.limits import Limits
from serving.logs import configure, log_figures, log_refusal, log_request
from serving.memory import settle_heap
from serving.remote import RemoteEngine
from serving.rpc.server import RpcServer
from serving.settings import Settings, reply_format_of, served_name
from serving.signals import Signals

_log = logging.getLogger(__name__)
END_SECONDS = 5.0
"""Seconds after the drain in which the server ends, in any case."""
_GRACE = 1.0  # seconds for the last messages of calls that have ended
_SHORT_GRACE = 0.5  # the same after a second signal
_FOREVER = 1e6  # seconds


def serve(
    settings: Settings, access: Access, child: EngineChild, say: Callable[[str], None]
) -> int:
    """Serves until a signal ends it.

    Args:
      child: the process of the engine, which has its first message.
      say: callback for status lines, such as the ports.

    Returns:
      The exit code: 1 if the engine died.

    Raises:
      ConfigError: weights or sizes that cannot be used.
      OSError: a port that cannot be used.
    """
    configure(settings.log_level)
    worker = RemoteEngine(child.socket)
    try:
        worker.wait_for_description(_tokenizer(settings))
        return asyncio.run(_serve(settings, access, worker, child, say))
    except ClosedError:
        _log.error("the engine's process ended by %s", child.how_it_ended())
        return child.code


def _tokenizer(settings: Settings) -> Tokenizer | None:
    """The tokenizer of the settings' folder, read while the engine reads the weights; the engine
    reports what is wrong.
    """
    with contextlib.suppress(ConfigError):
        return Tokenizer(settings.model or embedded("target"))
    return None


def _limits(settings: Settings) -> Limits:
    given = {name: getattr(settings, name) for name in options_of(Limits)}
    slots = settings.max_num_seqs or EngineConfig.max_num_seqs
    # More sequences than slots and places of the queue could never be accepted.
    given["max_n"] = min(settings.max_n, slots + settings.max_waiting)
    return Limits(**given)


async def _announce(frontend: Frontend, server: RpcServer) -> None:
    """Logs each state of the frontend, and sets the health accordingly."""
    state = frontend.state
    while state is not State.DEAD:
        state = await frontend.change(state)
        _log.info("the engine is %s", state.value)
        server.show(state)


async def _settle(frontend: Frontend) -> None:
    """Relieves the collector of garbage of what the process has read and imported."""
    await frontend.prepared()
    settle_heap(collects=frontend.state is State.STARTING)


class _Service:
    """Both protocols over one frontend, from their ports to the end of their last request."""

    def __init__(self, settings: Settings, worker: RemoteEngine, access: Access):
        self._settings = settings
        self.frontend = Frontend(
            worker,
            name=served_name(settings),
            limits=_limits(settings),
            reply_format=reply_format_of(settings, worker.description.tokenizer),
            report=log_request,
            report_refusal=log_refusal,
        )
        self._http, self._rpc = _servers(settings, self.frontend, access)

    async def listen(self) -> list[int]:
        """Listens, and returns the ports, gRPC's first; HTTP's is -1 if it is off.

        Raises:
          OSError: an address cannot be used.
        """
        host, http_port = self._settings.host, self._settings.http_port
        port = await self._rpc.start(host, self._settings.port)
        if http_port >= 0:
            http_port = await self._http.start(host, http_port)
        return [port, http_port]

    async def run(self, signals: Signals, *, on_drain: Callable[[float], None]) -> int:
        """Starts the engine and serves until a signal ends it; returns the exit code.

        Args:
          on_drain: called with the seconds that open requests have, when the drain begins.
        """
        settings, frontend = self._settings, self.frontend
        frontend.start()
        tasks = [
            asyncio.create_task(_announce(frontend, self._rpc)),
            asyncio.create_task(_settle(frontend)),
        ]
        if settings.round_seconds:
            tasks.append(asyncio.create_task(frontend.watch(settings.round_seconds)))
        if settings.stats_seconds:
            tasks.append(asyncio.create_task(log_figures(frontend, settings.stats_seconds)))
        await signals.stop.wait()
        seconds = settings.drain_seconds if signals.failure is None else 0.0
        on_drain(seconds)
        _log.info("stopping; waiting up to %g s for open requests", seconds)
        self._rpc.show(State.DRAINING)
        is_done = await self._end(seconds, signals)
        for task in tasks:
            task.cancel()
        code = signals.failure or (1 if frontend.state is State.DEAD else 0)
        return code if is_done else signals.exit_code

    async def _end(self, seconds: float, signals: Signals) -> bool:
        """Drains and stops everything; False if a second signal cut the drain short."""

        async def end(drain_seconds: float, grace: float) -> None:
            await self.frontend.drain(drain_seconds)
            await asyncio.gather(self._rpc.stop(grace), self._http.stop(grace))

        ending = asyncio.create_task(end(seconds, _GRACE))
        hurry = asyncio.create_task(signals.hurry.wait())
        await asyncio.wait((ending, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if ending.done():
            await ending
            return True
        ending.cancel()
        # Open requests get their status; this does not wait for the engine.
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(end(0.0, _SHORT_GRACE), 2 * _SHORT_GRACE)
        return False


async def _serve(
    settings: Settings,
    access: Access,
    worker: RemoteEngine,
    child: EngineChild,
    say: Callable[[str], None],
) -> int:
    async def fail() -> None:
        how = await asyncio.to_thread(child.how_it_ended)
        signals.fail(f"the engine's process ended by {how}", child.code)

    async def end_failed_start() -> None:
        if await service.frontend.change(State.STARTING) is State.DEAD:
            signals.fail("the engine did not start", 1)

    def end_engine(timeout: float) -> bool:
        is_dead = service.frontend.state is State.DEAD
        code = signals.exit_code or signals.failure or int(is_dead)
        return child.stop(timeout, code, worker.order)

    tasks: list[asyncio.Task] = []
    signals = Signals(on_hangup=access.read_again)
    worker.end = end_engine
    worker.on_lost = lambda: tasks.append(asyncio.create_task(fail()))
    service = _Service(settings, worker, access)
    ports = await service.listen()
    for protocol, port in zip(("gRPC", "HTTP"), ports, strict=True):
        if port >= 0:
            say(f"{protocol} listens on {settings.host}:{port}")
    tasks.append(asyncio.create_task(end_failed_start()))
    code = await service.run(signals, on_drain=lambda s: child.end_within(s + END_SECONDS))
    for task in tasks:
        task.cancel()
    if signals.hurry.is_set() or service.frontend.is_stuck:
        # Threads may still work on prompts, or wait for the process of the engine.
        child.end(_GRACE)
        logging.shutdown()
        os._exit(code)
    await asyncio.to_thread(child.end, 2 * _GRACE)  # it writes its last messages
    return code


def _servers(
    settings: Settings, frontend: Frontend, access: Access
) -> tuple[HttpServer, RpcServer]:
    common = dict(
        tokens=access.tokens,
        certificates=access.certificates,
        max_message_bytes=settings.max_message_mib << 20,
        idle_seconds=settings.idle_seconds or _FOREVER,
    )
    http = HttpServer(
        frontend,
        **common,
        allowed_hosts=settings.hosts,
        allowed_origins=settings.origins,
        with_page=settings.page,
        gate=Gate(
            most=access.max_connections, most_per_address=access.max_per_address, reserve=RESERVE
        ),
        time_limits=TimeLimits(head=settings.header_seconds),
    )
    server = RpcServer(
        frontend,
        **common,
        max_connections=access.max_connections,
        handshake_seconds=settings.header_seconds,
        max_connection_seconds=settings.max_connection_seconds,
        with_reflection=settings.offers_reflection,
    )
    return http, server
