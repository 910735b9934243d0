"""`python -m lab hostile`: attacks on a server of its own, and their effect on honest clients."""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench import rows
from bench.command import Command, RowOptions, option, repeatable
from bench.printed import show_table
from bench.served import Served
from lab.attackers import Attackers
from lab.attacks import ATTACKS
from lab.watch import Snapshot, Watch, resident_bytes
from peagle_jax import ConfigError
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

TOGETHER = "all together"
_HONEST, _HOSTILE = "honest-token", "hostile-token"  # bearer tokens of the two kinds of clients
_VICTIM = "honest-request"
_MB = 1e6
_MOST_HEALTH_MS = 100.0  # p99
_MOST_GAP_RATIO = 1.5  # of p99 to the quiet p99
MOST_MEMORY_MB = 200.0
_MOST_LOG_MB = 1.0  # a minute
_MOST_LATE_MS = 20.0  # p99 wake-up delay of the probing process: above it the machine is too busy
_PAUSE = 1.0  # seconds after an attack before memory is compared
_PATIENCE = 20.0  # further seconds for memory to return to its limit


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    """Options of this command.

    Args:
      only: run attacks whose name contains TEXT; repeatable
      seconds: seconds of an attack
      hold: most seconds that an attack holds a silent connection
      quiet: seconds without an attack that are measured before each attack
      scale: factor on the number of hostile requests
      descriptors: file descriptors that the server may open
      together: run all attacks at once at the end
      repeats: most repeats of a measurement in which other work delayed the measuring process
      serve_options: options of peagle-serve
    """

    only: tuple[str, ...] = repeatable(metavar="TEXT")
    seconds: float = 10.0
    hold: float = 75.0
    quiet: float = 5.0
    scale: float = 1.0
    descriptors: int = 300
    together: bool = True
    repeats: int = option(2, type=int)
    serve_options: tuple[str, ...] = option((), positional=True, nargs="*", metavar="-- OPTION")
    out: Path = Path("hostile.jsonl")


def run(options: Options) -> int:
    """Runs the attacks, a row each, and prints them; 1 if a target is missed."""
    ms = lambda found: f"{found['p99']:.0f}/{found['max']:.0f}"
    header = ["attack", "requests", "wrong", "health", "gRPC health", "gap", "quiet gap", "late"]
    header += ["MB before/peak/after", "log MB/min", "files", "service s", "attackers s"]
    header += ["missed"]
    done = hostile(options, options.environment())
    lines = [
        [
            row["attack"],
            f"{row['attempts']:,}",
            f"{row['wrong']:,}",
            ms(row["under_attack"]["health_ms"]),
            ms(row["under_attack"]["rpc_health_ms"]),
            ms(row["under_attack"]["gap_ms"]),
            ms(row["quiet"]["gap_ms"]),
            ms(row["under_attack"]["prober_late_ms"]),
            "/".join(f"{value:.0f}" for value in row["memory_mb"].values()),
            f"{row['log_mb_per_minute']:.2f}",
            "/".join(map(str, row["descriptors"].values())),
            f"{row['service_cpu_seconds']:.1f}",
            f"{row['attackers_cpu_seconds']:.1f}",
            " ".join(row["missed"]),
        ]
        for row in done
    ]
    show_table(header, lines, options.out, note="milliseconds: p99/max; seconds: processor time; ")
    return 1 if any(row["missed"] for row in done) else 0


def hostile(options: Options, environment: dict) -> list[dict]:
    """Runs the attacks, appends a row each to `options.out`, and returns the rows.

    Raises:
      ConfigError: no attack of that name, or a server that does not start.
    """
    return asyncio.run(_run_all(options, groups_of(options), environment))


def groups_of(options: Options) -> list[tuple[list[str], bool]]:
    """(names of attacks that run at the same time, whether they need TLS): each attack, then all
    together.

    Raises:
      ConfigError: `options.only` names no attack.
    """
    plain = [one.name for one in ATTACKS if not one.needs_tls]
    if options.only == (TOGETHER,):
        return [(plain, False)]
    chosen = [
        one for one in ATTACKS if not options.only or any(x in one.name for x in options.only)
    ]
    groups = [([one.name], one.needs_tls) for one in chosen]
    some = [name for name in plain if any(name == one.name for one in chosen)]
    if options.together and len(some) > 1 and (not options.only or TOGETHER in options.only):
        groups.append((some, False))
    if not groups:
        raise ConfigError(f"no attack is named like {' or '.join(options.only)}")
    return groups


async def _run_all(
    options: Options, groups: Sequence[tuple[list[str], bool]], environment: dict
) -> list[dict]:
    done = []
    for with_tls in (False, True):
        own = [names for names, needs_tls in groups if needs_tls is with_tls]
        async for row in _run(options, own, with_tls=with_tls):
            done.append(rows.rounded({"kind": "hostile", **row, **environment}))
            rows.append(options.out, done[-1])
    return done


def start(
    options: Sequence[str], folder: Path, *, with_tls: bool, descriptors: int | None
) -> tuple[Served, Path | None]:
    """A server with HTTP and two bearer tokens, and the file of its certificate if it speaks
    TLS."""
    tokens = folder / "tokens"
    tokens.write_text(f"{_HONEST}\n{_HOSTILE}\n")
    own = ["--http-port", "0", "--auth-token-file", str(tokens)]
    cert = None
    if with_tls:
        cert, key = folder / "cert.pem", folder / "key.pem"
        _make_certificate(cert, key)
        own += ["--tls-cert", str(cert), "--tls-key", str(key)]
    own += options
    resolve(own)
    return Served(own, log=folder / "serve.log", descriptors=descriptors), cert


def _make_certificate(cert: Path, key: Path) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
    ]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError("attacks on TLS need the command openssl: install it") from error


async def _run(
    options: Options, groups: Sequence[Sequence[str]], *, with_tls: bool
) -> AsyncIterator[dict]:
    """A row for each group of attacks; a server that does not recover is replaced."""
    left = list(groups)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            server, ca = start(
                options.serve_options,
                Path(folder),
                with_tls=with_tls,
                descriptors=options.descriptors,
            )
            with server:
                wait(server, ca)
                while left:
                    names = left.pop(0)
                    label = names[0] if len(names) == 1 else TOGETHER
                    print(f"{label} ...", flush=True)
                    for _ in range(1 + options.repeats):
                        row = await measure(
                            server,
                            names,
                            ca=ca,
                            seconds=options.seconds,
                            hold_seconds=options.hold,
                            quiet_seconds=options.quiet,
                            scale=options.scale,
                        )
                        if row["under_attack"]["prober_late_ms"]["p99"] <= _MOST_LATE_MS:
                            break
                    yield row
                    if server.process.poll() is not None or not _has_recovered(server, ca):
                        break


def wait(server: Served, ca: Path | None) -> None:
    """Waits until a server of `start` serves and has compiled all batch sizes."""
    with _channel(server, ca) as channel:
        stub = GenerationStub(channel)
        own = (("authorization", f"Bearer {_HONEST}"),)
        until = time.monotonic() + 600.0
        while True:
            try:
                stats = stub.GetStats(pb.GetStatsRequest(), metadata=own, timeout=5.0)
                if stats.state == "serving" and not stats.batch_sizes_pending:
                    return
            except grpc.RpcError:
                pass
            server.check(until, "serve")
            time.sleep(0.1)


def _channel(server: Served, ca: Path | None) -> grpc.Channel:
    address = server.wait_for_port()
    if ca is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes()))


def _has_recovered(server: Served, ca: Path | None) -> bool:
    try:
        with _channel(server, ca) as channel:
            stub = GenerationStub(channel)
            own = (("authorization", f"Bearer {_HONEST}"),)
            stub.GetStats(pb.GetStatsRequest(), metadata=own, timeout=30.0)
            return True
    except grpc.RpcError:
        return False


async def measure(
    server: Served,
    names: Sequence[str],
    *,
    seconds: float,
    hold_seconds: float,
    quiet_seconds: float,
    scale: float = 1.0,
    most_memory_mb: float = MOST_MEMORY_MB,
    ca: Path | None = None,
) -> dict:
    """Runs some attacks at the same time.

    Args:
      server: as `start` makes it, ready.
      names: of `ATTACKS`.
      seconds: no hostile request starts after this time.
      hold_seconds: how long hostile clients keep connections that are silent or slow.
      quiet_seconds: time for which the honest clients are watched before, and again after.
      scale: share of each attack's requests to send.
      most_memory_mb: allowed growth of resident memory; the measurement waits up to 20 s for it.
      ca: file of the server's certificate; None without TLS.

    Returns:
      The row: what honest clients saw in the quiet time and under attack, resources of the server,
        the answers to hostile requests, and `missed`, the targets that are not met.
    """
    with Attackers(
        names,
        http=server.http_address,
        grpc=server.address,
        token=_HOSTILE,
        victim=_VICTIM,
        seconds=seconds,
        hold_seconds=hold_seconds,
        scale=scale,
    ) as attackers:
        row = await _watch(server, attackers, quiet_seconds, most_memory_mb, ca)
    one = next((one for one in ATTACKS if names == [one.name]), None)
    row = {"attack": TOGETHER if one is None else one.name} | row
    asks_for_work = any(one.asks_for_work for one in ATTACKS if one.name in names)
    return row | {"missed": missed(row, asks_for_work=asks_for_work)}


async def _watch(
    server: Served,
    attackers: Attackers,
    quiet_seconds: float,
    most_memory_mb: float,
    ca: Path | None,
) -> dict:
    async with Watch(server, token=_HONEST, request_id=_VICTIM, ca=ca) as watch:
        await asyncio.sleep(1.0)  # the first probes pay for connections
        start = Snapshot.of(server)
        await asyncio.sleep(quiet_seconds)
        before = Snapshot.of(server)
        watch.peak_bytes = before.resident_bytes
        watch.peak_descriptors = before.num_descriptors
        attackers.begin()
        found = await asyncio.to_thread(attackers.results)
        ended = time.perf_counter()
        await asyncio.sleep(_PAUSE)
        under = watch.seen((before.time, time.perf_counter()))
        most = before.resident_bytes + most_memory_mb * _MB
        while resident_bytes(server.process.pid) > most and time.perf_counter() < ended + _PATIENCE:
            await asyncio.sleep(0.1)
        after = Snapshot.of(server)
        await asyncio.sleep(quiet_seconds)
        quiet = watch.seen((start.time, before.time), (after.time, time.perf_counter()))
        cut, differ = watch.check_texts()
    minutes = (after.time - before.time) / 60
    log_mb = (after.log_bytes - before.log_bytes) / _MB
    return {
        "attempts": sum(one["attempts"] for one in found["attacks"].values()),
        "wrong": sum(one["wrong"] for one in found["attacks"].values()),
        "answers": {name: one["answers"] for name, one in found["attacks"].items()},
        "seconds": ended - before.time,
        "quiet": quiet,
        "under_attack": under,
        "streams_cut": cut,
        "streams_differ": differ,
        "memory_mb": {
            "before": before.resident_bytes / _MB,
            "peak": watch.peak_bytes / _MB,
            "after": after.resident_bytes / _MB,
        },
        "descriptors": {
            "before": before.num_descriptors,
            "peak": watch.peak_descriptors,
            "after": after.num_descriptors,
        },
        "log_mb": log_mb,
        "log_mb_per_minute": log_mb / minutes,
        **_work(start, before, after),
        "attackers_cpu_seconds": found["cpu_seconds"],
    }


def _work(start: Snapshot, before: Snapshot, after: Snapshot) -> dict:
    """Processor time of the server from `before` to `after`.

    `service_cpu_seconds` is the cost of the attack: processor time of the threads that receive,
    parse and refuse, minus their rate in the quiet time. It excludes XLA's threads and the engine's
    thread (the busiest other thread in the quiet time), because these decode for the honest client.
    """
    quiet, under = _growth(start, before), _growth(before, after)
    engine = max(quiet, key=quiet.get)
    ratio = (after.time - before.time) / (before.time - start.time)
    extra = sum(under.values()) - under.get(engine, 0.0)
    extra -= ratio * (sum(quiet.values()) - quiet[engine])
    return {
        "server_cpu_seconds": after.cpu_seconds - before.cpu_seconds,
        "service_cpu_seconds": max(0.0, extra),
    }


def _growth(one: Snapshot, other: Snapshot) -> dict[int, float]:
    """Seconds of each thread between two snapshots, without threads of compilers and of XLA's
    pools."""
    return {
        number: seconds - one.threads.get(number, ("", 0.0))[1]
        for number, (name, seconds) in other.threads.items()
        if not name.startswith(("tf_", "llvm"))
    }


def missed(row: dict, *, asks_for_work: bool) -> list[str]:
    """Names of the targets that a row does not meet."""
    under, memory = row["under_attack"], row["memory_mb"]
    gap_ratio = under["gap_ms"]["p99"] / max(1e-9, row["quiet"]["gap_ms"]["p99"])
    rules = {
        "status": row["wrong"] == 0,
        "health": max(under[x]["p99"] for x in ("health_ms", "rpc_health_ms")) <= _MOST_HEALTH_MS
        # A failed probe counts as slower than all others.
        and under["probes_failed"] <= 0.01 * under["probes"],
        # If hostile clients send valid requests, the engine rightly shares its rounds with them.
        "latency": asks_for_work or gap_ratio <= _MOST_GAP_RATIO,
        "streams": row["streams_cut"] == row["streams_differ"] == 0,
        "memory": memory["after"] - memory["before"] <= MOST_MEMORY_MB,
        "log": row["log_mb_per_minute"] <= _MOST_LOG_MB,
    }
    return [name for name, holds in rules.items() if not holds]


COMMAND = Command(
    examples=('hostile --only "prompt ids" --only "silent" -- --max-num-seqs 4',),
    description="""
Starts a peagle-serve (options after -- are its options), runs each attack and then all together,
and reports the effect on honest clients. Exit code 1 if a target is missed:

- every attack gets the right status;
- the p99 of health probes is at most 100 ms;
- the p99 of the gap between two messages of a stream is at most 1.5 times that without an attack;
- memory returns to within 200 MB of its value before the attack;
- the log grows by less than 1 MB a minute.
""",
    options=Options,
    run=run,
)
