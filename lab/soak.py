"""`python -m lab soak`: mixed traffic for an hour, and what grows in the server meanwhile."""

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from bench import rows
from bench.command import Command
from bench.printed import show_table
from bench.served import Served, ServerOptions, processes, wait_for_programs
from lab.raw_connections import Address, connected, head, status
from lab.watch import num_descriptors
from peagle_jax import ConfigError
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub

_MB = 1e6
_LONG = 600  # tokens of a long prompt
_SHARED = 300  # tokens that some prompts begin with
_MOST_OPEN = 64  # requests at once; one that finds no place is not sent
_WARM = 1 / 6  # of the time, before which growth does not count
_MOST_GROWTH_MB = 50.0  # of a process, on the line through its samples after the warm-up
_SPARE = 8  # descriptors and threads that may come and go
_DRAIN = 60.0  # seconds in which the last requests end


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of this command.

    Args:
      minutes: minutes of traffic
      rate: requests a second
      interval: seconds between two samples
    """

    minutes: float = 60.0
    rate: float = 2.0
    interval: float = 30.0
    out: Path = Path("soak.jsonl")


@dataclass(frozen=True)
class Clients:
    """What sends the requests of one server.

    Args:
      stub: of its gRPC port.
      http: its HTTP port.
      draw: the traffic's random numbers.
    """

    stub: GenerationStub
    http: Address
    draw: random.Random

    def ids(self, count: int) -> pb.TokenIds:
        """A prompt of random tokens."""
        return pb.TokenIds(ids=[self.draw.randint(5, 400) for _ in range(count)])

    def tokens(self, count: int, prompt: pb.TokenIds | None = None, **rest) -> pb.GenerateRequest:
        """A request for exactly `count` tokens, half of them greedy."""
        sampling = pb.Sampling(temperature=self.draw.choice((0.0, 1.0)))
        stopping = pb.Stopping(max_tokens=count, ignore_eos=True)
        prompt = prompt or self.ids(self.draw.randint(1, 40))
        return pb.GenerateRequest(tokens=prompt, sampling=sampling, stopping=stopping, **rest)

    async def post(
        self,
        path: str,
        body: dict | bytes,
        *,
        receive_bytes: int | None = None,
        most: int | None = None,
    ) -> str:
        """Sends a request over HTTP and returns the status of the answer.

        Args:
          receive_bytes: size of the kernel's buffer of a client that reads slowly; None: it does
            not.
          most: bytes of the answer after which the client leaves; None: it reads all.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        request = head("POST", path, (fields | {"Connection": "close"}).items()) + content
        async with connected(self.http, receive_bytes=receive_bytes) as (reader, writer):
            writer.write(request)
            found, taken = await status(reader), 0
            while most is None or taken < most:
                part = await reader.read(receive_bytes or 1 << 16)
                if not part:
                    break
                taken += len(part)
                if receive_bytes is not None:
                    await asyncio.sleep(0.05)
            return found


async def _stream(to: Clients, request: pb.GenerateRequest, *, pause: float = 0.0) -> str:
    num_tokens = 0
    async for delta in to.stub.Generate(request):
        num_tokens += len(delta.token_ids)
        await asyncio.sleep(pause)
    return "OK" if num_tokens == request.stopping.max_tokens else f"{num_tokens} tokens"


async def _prefix(to: Clients) -> str:
    start = list(range(5, 5 + _SHARED))
    prompt = pb.TokenIds(ids=start + list(to.ids(8).ids))
    return await _stream(to, to.tokens(16, prompt))


async def _cancelled(to: Clients) -> str:
    call = to.stub.Generate(to.tokens(200))
    await call.read()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.read()
    return "cancelled"


async def _late(to: Clients) -> str:
    return "OK" if await to.stub.GenerateOnce(to.tokens(400), timeout=0.2) else ""


async def _aborted(to: Clients) -> str:
    name = f"soak-{to.draw.getrandbits(64)}"
    call = to.stub.Generate(to.tokens(400, request_id=name))
    ended = False
    async for delta in call:
        await to.stub.Abort(pb.AbortRequest(request_ids=[name]))
        ended = delta.finish.reason == pb.FINISH_REASON_ABORT
    return "aborted" if ended else "OK"


async def _wrong_call(to: Clients) -> str:
    return str(await to.stub.GenerateOnce(to.tokens(1, pb.TokenIds(ids=[1 << 30]))))


async def _json(to: Clients) -> str:
    names = [f"key{to.draw.randint(0, 10**9)}" for _ in range(2)]
    known = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    new = {"type": "object", "properties": {n: {"type": "boolean"} for n in names}}
    schema = to.draw.choice((known, new)) | {"additionalProperties": False}
    request = pb.GenerateRequest(
        text="json: ",
        stopping=pb.Stopping(max_tokens=48),
        structured=pb.Structured(json_schema=json.dumps(schema)),
    )
    return "OK" if await to.stub.GenerateOnce(request) else ""


def _completion(to: Clients, count: int, **fields) -> dict:
    prompt = list(to.ids(to.draw.randint(1, 40)).ids)
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True} | fields


def _chat(to: Clients, **fields) -> dict:
    said = " ".join(str(to.draw.randint(0, 999)) for _ in range(to.draw.randint(1, 30)))
    return {"messages": [{"role": "user", "content": said}], "max_tokens": 24} | fields


def _regex(to: Clients) -> dict:
    pattern = f"[0-9]{{3}}-{to.draw.randint(0, 99)}[a-z]{{2,8}}"
    return _chat(to, structured_outputs={"regex": pattern})


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    Args:
      weight: its share of the traffic.
      right: the answers that it may get.
      send: makes one request and returns the answer.
    """

    weight: int
    right: frozenset[str]
    send: Callable[[Clients], Awaitable[str]]


def _kind(weight: int, right: str, send: Callable[[Clients], Awaitable[str]]) -> Kind:
    return Kind(weight, frozenset(right.split(",")), send)


KINDS = {
    "gRPC short": _kind(6, "OK", lambda to: _stream(to, to.tokens(24))),
    "gRPC long prompt": _kind(2, "OK", lambda to: _stream(to, to.tokens(8, to.ids(_LONG)))),
    "gRPC shared prefix": _kind(4, "OK", _prefix),
    "gRPC n": _kind(1, "OK", lambda to: _several(to)),
    "gRPC slow reader": _kind(1, "OK", lambda to: _stream(to, to.tokens(64), pause=0.1)),
    "gRPC cancelled": _kind(3, "cancelled", _cancelled),
    "gRPC deadline": _kind(2, "OK,DEADLINE_EXCEEDED", _late),
    "gRPC aborted": _kind(2, "OK,aborted", _aborted),
    "gRPC JSON schema": _kind(2, "OK", _json),
    "gRPC bad request": _kind(2, "INVALID_ARGUMENT", _wrong_call),
    "HTTP completion": _kind(4, "200", lambda to: to.post("/v1/completions", _completion(to, 24))),
    "HTTP chat": _kind(3, "200", lambda to: to.post("/v1/chat/completions", _chat(to))),
    "HTTP stream": _kind(
        4, "200", lambda to: to.post("/v1/chat/completions", _chat(to, stream=True))
    ),
    "HTTP regex": _kind(2, "200", lambda to: to.post("/v1/chat/completions", _regex(to))),
    "HTTP slow reader": _kind(
        1,
        "200",
        lambda to: to.post("/v1/completions", _completion(to, 64, stream=True), receive_bytes=2048),
    ),
    "HTTP left": _kind(
        3, "200", lambda to: to.post("/v1/completions", _completion(to, 400, stream=True), most=1)
    ),
    "HTTP bad JSON": _kind(1, "400", lambda to: to.post("/v1/completions", b'{"prompt": ')),
    "HTTP bad field": _kind(
        1, "400", lambda to: to.post("/v1/completions", _completion(to, 4, temperature=-1))
    ),
    "HTTP no route": _kind(1, "404", lambda to: to.post("/v1/nothing", {})),
}


async def _several(to: Clients) -> str:
    request = to.tokens(16, n=3)
    request.sampling.temperature = 1.0
    answer = await to.stub.GenerateOnce(request)
    return "OK" if len(answer.sequences) == 3 else f"{len(answer.sequences)} sequences"


def run(options: Options) -> int:
    """Runs the traffic and prints what grew; 1 if a target is missed."""
    row = rows.rounded({"kind": "soak", **soak(options), **options.environment()})
    rows.append(options.out, row)
    names = ("resident_mb", "descriptors", "threads")
    header = ["process", *names, "MB an hour", "seconds of processor"]
    lines = [
        [
            one["role"],
            *("/".join(f"{one[moment][name]:.0f}" for moment in MOMENTS) for name in names),
            f"{one['mb_an_hour']:+.1f}",
            f"{one['cpu_seconds']:.0f}",
        ]
        for one in row["processes"]
    ]
    show_table(header, lines, options.out, note=f"{'/'.join(MOMENTS)}; ")
    print(f"tokens a round: {row['acceptance']}; left when idle: {row['left']}")
    for kind, answers in row["answers"].items():
        print(f"{kind:20} {answers}")
    print(f"missed: {' '.join(row['missed']) or 'nothing'}")
    return 1 if row["missed"] else 0


MOMENTS = ("start", "warm", "end")


def soak(options: Options) -> dict:
    """Starts a server, sends the traffic, and appends a row for each sample to `options.out`.

    Returns:
      The row: each process at the start, after the warm-up and at the end, answers by kind, tokens
        a round, what an idle server holds at the end, and `missed`, the targets that are not met.

    Raises:
      ConfigError: the server does not start, or ends.
    """
    served = ["--http-port", "0", *options.serve_options]
    with (
        tempfile.TemporaryDirectory() as folder,
        options.start(served, Path(folder, "log")) as server,
    ):
        server.wait()
        if options.preset is not None:  # compiling a full-size model takes longer than the warm-up
            wait_for_programs(server.address)
        return asyncio.run(_soak(server, options))


async def _soak(server: Served, options: Options) -> dict:
    draw = random.Random(options.seed)
    answers = {kind: Counter() for kind in KINDS}
    samples: list[dict] = []
    num_sent = 0
    open_: set[asyncio.Task] = set()
    async with grpc.aio.insecure_channel(server.address) as channel:
        to = Clients(GenerationStub(channel), Address.of(server.http_address), draw)
        begin = time.monotonic()
        end, due, sample_due = begin + 60 * options.minutes, begin, begin
        while (now := time.monotonic()) < end:
            if now >= sample_due:
                sample_due += options.interval
                samples.append(await _sample(server, to, now - begin))
                rows.append(options.out, {"kind": "soak sample", **samples[-1]})
            kind = draw.choices(list(KINDS), [one.weight for one in KINDS.values()])[0]
            if len(open_) < _MOST_OPEN:
                task = asyncio.create_task(_answered(KINDS[kind], to, answers[kind]))
                num_sent += 1
                open_.add(task)
                task.add_done_callback(open_.discard)
            due += draw.expovariate(options.rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        if open_:
            await asyncio.wait(open_, timeout=_DRAIN)
        left = await _left(to)
        samples.append(await _sample(server, to, time.monotonic() - begin))
    wrong = {
        kind: dict(found) for kind, found in answers.items() if not set(found) <= KINDS[kind].right
    }
    row = {
        "preset": options.preset,
        "layers": options.layers,
        "synthetic_acceptance_length": options.synthetic_acceptance_length,
        "minutes": options.minutes,
        "rate": options.rate,
        "requests": num_sent,
        "unanswered": num_sent - sum(found.total() for found in answers.values()),
        "answers": {kind: dict(found) for kind, found in answers.items()},
        "acceptance": [samples[i]["acceptance"] for i in (1, _warm(samples), -1)],
        "left": left,
        "processes": _grown(samples),
    }
    return row | {"missed": missed(row, wrong)}


async def _answered(kind: Kind, to: Clients, answers: Counter) -> None:
    try:
        found = await kind.send(to)
    except grpc.aio.AioRpcError as error:
        found = error.code().name
    except OSError as error:
        found = type(error).__name__
    answers[found] += 1


async def _sample(server: Served, to: Clients, seconds: float) -> dict:
    if server.process.poll() is not None:
        raise ConfigError(f"peagle-serve ended; it said: {server.text()[-2000:]}")
    stats = await to.stub.GetStats(pb.GetStatsRequest())
    found = {}
    for pid, one in processes(server.process.pid).items():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[pid] = {
                "role": one.role,
                "resident_mb": one.resident_bytes / _MB,
                "cpu_seconds": one.cpu_seconds,
                "descriptors": num_descriptors(pid),
                "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
            }
    return {
        "seconds": seconds,
        "acceptance": round(stats.acceptance.acceptance_length, 4),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "pages_used": stats.kv_pages_used,
        "pages_idle": stats.kv_pages_idle,
        "log_mb": server.log.stat().st_size / _MB,
        "processes": found,
    }


async def _left(to: Clients) -> dict[str, int]:
    """What the server still holds, once all clients have gone."""
    until = time.monotonic() + _DRAIN
    while True:
        stats = await to.stub.GetStats(pb.GetStatsRequest())
        left = dict(running=stats.num_running, waiting=stats.num_waiting, pages=stats.kv_pages_used)
        if not any(left.values()) or time.monotonic() > until:
            return left
        await asyncio.sleep(0.1)


def _warm(samples: Sequence[dict]) -> int:
    """Place of the first sample after the warm-up."""
    moment = _WARM * samples[-1]["seconds"]
    return next(i for i, one in enumerate(samples) if one["seconds"] >= moment)


def _grown(samples: Sequence[dict]) -> list[dict]:
    """Each process that lived from the warm-up to the end: its resources, and its growth."""
    warm = samples[_warm(samples) :]
    found = []
    for pid, last in warm[-1]["processes"].items():
        own = [(one["seconds"], one["processes"][pid]) for one in warm if pid in one["processes"]]
        if len(own) < 2:
            continue
        hours = [seconds / 3600 for seconds, _ in own]
        slope = np.polyfit(hours, [one["resident_mb"] for _, one in own], 1)[0]
        first = samples[0]["processes"].get(pid, own[0][1])
        found.append(
            {
                "role": last["role"],
                **dict(zip(MOMENTS, (first, own[0][1], last), strict=True)),
                "mb_an_hour": float(slope),
                "growth_mb": float(slope * (hours[-1] - hours[0])),
                "cpu_seconds": last["cpu_seconds"] - first["cpu_seconds"],
            }
        )
    return found


def missed(row: dict, wrong: dict) -> list[str]:
    """Names of the targets that a row does not meet."""
    each = row["processes"]
    rules = {
        "status": not wrong and not row["unanswered"],
        "memory": all(one["growth_mb"] <= _MOST_GROWTH_MB for one in each),
        "descriptors": all(
            one["end"]["descriptors"] <= one["start"]["descriptors"] + _SPARE for one in each
        ),
        "threads": all(one["end"]["threads"] <= one["warm"]["threads"] + _SPARE for one in each),
        "left": not any(row["left"].values()),
    }
    return [name for name, holds in rules.items() if not holds]


COMMAND = Command(
    examples=(
        "soak --minutes 10 --rate 4 -- --max-num-seqs 4",
        "soak --preset qwen3-8b --synthetic-acceptance-length 3.1 --rate 20",
    ),
    description="""
Starts a peagle-serve (options after -- are its options), with --preset one of random weights, and
sends it mixed traffic over gRPC and HTTP: short and long prompts, shared prefixes, structured
output, slow readers, clients that leave, cancel, abort or come too late, and bad requests. Samples
memory, descriptors and threads of each of its processes. Exit code 1 if a target is missed:

- every request gets one answer, and a right one;
- after the warm-up, a sixth of the time, no process grows by more than 50 MB;
- descriptors and threads are at the end what they were;
- an idle server holds no request and no page.
""",
    options=Options,
    run=run,
)
