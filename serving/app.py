"""Builds the server from its settings, runs it, and drains it."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

from peagle_jax import ConfigError, Engine, runs
from peagle_jax.config import EngineConfig
from peagle_jax.draft_head import DraftHead
from peagle_jax.engine import stored_programs
from peagle_jax.engine.memory import pages_in
from peagle_jax.loading import load_weights
from peagle_jax.models import Decoder
from serving.access import RESERVE, Access
from serving.frontend import Frontend, State
from serving.hosts import FAILED, LOST
from serving.http.connection import TimeLimits
from serving.http.gate import Gate
from serving.http.server import HttpServer
from serving.limits import Limits
from serving.logs import configure, log_figures, log_refusal, log_request
from serving.option_types import num_bytes
from serving.rpc.leader import Leader
from serving.rpc.server import RpcServer
from serving.rpc.several_hosts import failures_end_all, follow, lead
from serving.settings import Settings, engine_config, served_name
from serving.signals import Signals
from serving.stream import Stream
from serving.tracing import Tracer
from serving.worker import ProgressLog

_log = logging.getLogger(__name__)
_GRACE = 5.0  # seconds for the last messages of calls that have ended
_SHORT_GRACE = 0.5  # the same after a second signal
_FOREVER = 1e6  # seconds


def serve(
    settings: Settings,
    access: Access,
    *,
    cache_home: str | None,
    say: Callable[[str], None],
    make_engine: Callable[[Settings], Engine],
) -> int:
    """Serves until a signal ends it.

    Args:
      cache_home: the user's cache folder; None is `~/.cache`.
      say: callback for status lines, such as the ports.
      make_engine: makes the engine of the settings, not yet warm.

    Returns:
      The exit code: 1 if the engine died.

    Raises:
      ConfigError: weights or sizes that cannot be used.
      OSError: a port that cannot be used.
    """
    configure(settings.log_level)
    if not settings.no_cache:
        runs.keep_compiled_programs(cache_home)
    if settings.host_index:
        follow(settings, make_engine)
    if settings.compile_only:
        return _compile_only(settings, make_engine, say)
    if settings.num_hosts == 1:
        return _serve_requests(settings, access, make_engine, None, say)
    leader = lead(settings, say)
    with failures_end_all(leader):
        code = _serve_requests(settings, access, make_engine, leader, say)
        _end_hosts(leader, code)
    return code


def _serve_requests(
    settings: Settings,
    access: Access,
    make_engine: Callable[[Settings], Engine],
    leader: Leader | None,
    say: Callable[[str], None],
) -> int:
    tracer = None
    if settings.otlp_endpoint is not None:
        tracer = Tracer.to(settings.otlp_endpoint, served_name(settings))
    engine = make_engine(settings)
    if leader is not None:
        engine.programs.on_call = leader.send
    try:
        return asyncio.run(_serve(settings, engine, access, _reports(tracer), leader, say))
    finally:
        if tracer is not None:
            tracer.close()


def _compile_only(
    settings: Settings, make_engine: Callable[[Settings], Engine], say: Callable[[str], None]
) -> int:
    """Puts the programs of the settings, and the times of rounds, on disk; returns the exit code."""
    engine = make_engine(settings)
    engine.compile_missing(report=ProgressLog())
    missing = engine.missing_on_disk()
    if missing is None:
        raise ConfigError("programs are not kept on disk here: the log says why")
    engine.warm_up()
    say(f"{engine.programs.num_compiled} programs are in {stored_programs.kept_in()}")
    return 0


def waits_for_all(settings: Settings) -> bool:
    """Whether the server serves once all programs are loaded, see `Settings.ready`."""
    return settings.ready == "all" or (settings.ready is None and runs.compiles_in_children())


def _end_hosts(leader: Leader, code: int) -> None:
    """Ends the processes of all hosts after the service has ended."""
    leader.end(code, "the service has ended", others=LOST if code == FAILED else 0)


def make_engine(settings: Settings) -> Engine:
    """The engine of the settings, not yet warm.

    Raises:
      ConfigError: see `load_weights` and `Engine`.
    """
    config = sized_config(settings)
    target, head, tokenizer = load_weights(
        settings.model,
        settings.drafter,
        method=settings.method,
        dtype=config.dtype,
        quantization=settings.quantization,
        tensor_parallel=settings.tensor_parallel,
        activations=config.activations,
    )
    return engine_of(settings, config, target, head, tokenizer=tokenizer)


def sized_config(settings: Settings) -> EngineConfig:
    """The engine's config on this device, without the pages of `kv_cache_memory`."""
    config = engine_config(settings, runs.choose_dtype(settings.dtype))
    names = "prefill_chunk", "prefill_rows", "small_prefills"
    return runs.with_prefill_sizes(config, **{name: getattr(settings, name) for name in names})


def engine_of(
    settings: Settings, config: EngineConfig, target: Decoder, head: DraftHead | None, **parts
) -> Engine:
    """The engine of models that are on the device.

    Args:
      config: of `sized_config`.
      parts: further arguments of `Engine`.
    Raises:
      ConfigError: see `Engine`.
    """
    if settings.kv_cache_memory is not None:
        drafter = None if head is None else head.config
        pages = pages_in(num_bytes(settings.kv_cache_memory), target.config, drafter, config)
        config = replace(config, num_pages=pages)
    engine = Engine(target, head, config, **parts)
    # Requests without a seed are drawn anew after each start, and by each of several servers.
    engine.numbers = itertools.count(secrets.randbits(62))
    return engine


def _limits(settings: Settings) -> Limits:
    names = [one.name for one in fields(Limits) if one.name != "max_seconds"]
    given = {name: getattr(settings, name) for name in names}
    # More sequences than slots and places of the queue could never be accepted.
    given["max_n"] = min(settings.max_n, settings.max_num_seqs + settings.max_waiting)
    return Limits(max_seconds=settings.max_request_seconds or None, **given)


def _reports(tracer: Tracer | None) -> Callable[[Stream], None]:
    """The callback that reports a stream that has ended."""
    if tracer is None:
        return log_request

    def report(stream: Stream) -> None:
        log_request(stream)
        tracer.report(stream)

    return report


async def _announce(frontend: Frontend, server: RpcServer, leader: Leader | None) -> None:
    """Logs each state of the frontend, and sets the health accordingly. Other hosts end with a dead engine."""
    state = frontend.state
    while state is not State.DEAD:
        state = await frontend.change(state)
        _log.info("the engine is %s", state.value)
        server.show(state)
    if leader is not None:
        await asyncio.to_thread(leader.end, FAILED, "the engine failed, see above")


async def _serve(
    settings: Settings,
    engine: Engine,
    access: Access,
    report: Callable[[Stream], None],
    leader: Leader | None,
    say: Callable[[str], None],
) -> int:
    frontend = Frontend(
        engine,
        name=served_name(settings),
        limits=_limits(settings),
        waits_for_all=waits_for_all(settings),
        reply_format=settings.reply_format,
        report=report,
        report_refusal=log_refusal,
        before_death=(lambda: None) if leader is None else leader.wait_for_blame,
    )
    signals = Signals(on_hangup=access.read_again)
    if leader is not None:
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, signals.stop.set)
        leader.call_on_stop(stop)
        leader.watch_rounds(lambda: frontend.busy_since)
    http, server = _servers(settings, frontend, access)
    port = await server.start(settings.host, settings.port)
    say(f"gRPC listens on {settings.host}:{port}")
    if settings.http_port >= 0:
        port = await http.start(settings.host, settings.http_port)
        say(f"HTTP listens on {settings.host}:{port}")
    frontend.start()
    tasks = [asyncio.create_task(_announce(frontend, server, leader))]
    if settings.round_seconds:
        tasks.append(asyncio.create_task(frontend.watch(settings.round_seconds)))
    if settings.stats_seconds:
        tasks.append(asyncio.create_task(log_figures(frontend, settings.stats_seconds)))
    await signals.stop.wait()
    _log.info("stopping; waiting up to %g s for open requests", settings.drain_seconds)
    server.show(State.DRAINING)
    is_done = await _end(frontend, server, http, settings.drain_seconds, signals)
    for task in tasks:
        task.cancel()
    code = 1 if frontend.state is State.DEAD else 0
    if not is_done or frontend.is_stuck:
        # The interpreter aborts if it exits while a thread compiles or waits for a device.
        code = code if is_done else signals.exit_code
        if leader is not None:
            _end_hosts(leader, code)
        logging.shutdown()
        os._exit(code)
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


async def _end(
    frontend: Frontend, server: RpcServer, http: HttpServer, seconds: float, signals: Signals
) -> bool:
    """Drains and stops everything; False if a second signal cut the drain short."""

    async def end(drain_seconds: float, grace: float) -> None:
        await frontend.drain(drain_seconds)
        await asyncio.gather(server.stop(grace), http.stop(grace))

    ending = asyncio.create_task(end(seconds, _GRACE))
    hurry = asyncio.create_task(signals.hurry.wait())
    await asyncio.wait((ending, hurry), return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if ending.done():
        await ending
        return True
    ending.cancel()
    # Open requests get their status; this does not wait for the engine's thread.
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(end(0.0, _SHORT_GRACE), 2 * _SHORT_GRACE)
    return False
