"""`peagle-bench serve-load`: load test of a running server, and its overhead over the bare engine."""

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from tqdm import tqdm

from bench import rows
from bench.commands.serve_load import Options
from bench.constraints import Mix, prompt_of
from bench.latency import Outcome, figures
from bench.served import Served
from bench.sweep import Prompts, leave_out, prompt_set
from bench.timing import Measurement, drive
from peagle_jax import ConfigError, Engine, SamplingParams, runs
from serving.app import make_engine
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_WARM_UP_TOKENS = 16
_OPTIONS = [("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to make.

    Args:
      start: seconds after the beginning; None starts the call as soon as a client is free.
      cancel_after: tokens after which the client cancels the call; None never cancels.
      deadline: in seconds; None for no deadline.
    """

    request: pb.GenerateRequest
    start: float | None = None
    cancel_after: int | None = None
    deadline: float | None = None


def calls(
    options: Options, prompts: Prompts, count: int, *, rate: float | None = None
) -> list[Call]:
    """`count` calls over `prompts`, in order; arrivals and cancellations are drawn from the seed."""
    rng = np.random.default_rng(options.seed)
    starts = np.cumsum(rng.exponential(1 / rate, count)) if rate else [None] * count
    made, mix = [], Mix(options.constrained)
    chosen = itertools.islice(itertools.cycle(prompts), count)
    for index, (prompt, start) in enumerate(zip(chosen, starts, strict=True)):
        is_cancelled = rng.random() < options.cancel_share
        made.append(
            Call(
                request=_request(prompt, options, mix, index),
                start=start,
                cancel_after=int(rng.integers(0, options.max_tokens)) if is_cancelled else None,
                deadline=None if options.deadline_ms is None else options.deadline_ms / 1e3,
            )
        )
    return made


def _request(prompt: str | list[int], options: Options, mix: Mix, index: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.Sampling(temperature=options.temperature),
        stopping=pb.Stopping(max_tokens=options.max_tokens, ignore_eos=options.ignore_eos),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    mix.constrain(request, index)
    return request


async def load(
    address: str, todo: Sequence[Call], *, concurrency: int | None, on_done=lambda: None
) -> tuple[list[Outcome], float]:
    """Makes all calls and waits for their ends.

    Args:
      concurrency: number of clients, each with one call after the other; None starts every call at its
        `start`, without a limit.

    Returns:
      Outcomes in order, and the wall time of all in seconds.
    """
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = GenerationStub(channel)
        await channel.channel_ready()
        outcomes: list[Outcome | None] = [None] * len(todo)
        begin = time.perf_counter()

        async def make(index: int) -> None:
            if (start := todo[index].start) is not None:
                await asyncio.sleep(max(0.0, begin + start - time.perf_counter()))
            outcomes[index] = await _make(stub, todo[index])
            on_done()

        async def client(numbers: Iterator[int]) -> None:
            for index in numbers:
                await make(index)

        numbers = iter(range(len(todo)))
        async with asyncio.TaskGroup() as group:
            if concurrency is None:
                for index in numbers:
                    group.create_task(make(index))
            else:
                for _ in range(concurrency):
                    group.create_task(client(numbers))
        return outcomes, time.perf_counter() - begin


async def _make(stub: GenerationStub, call: Call) -> Outcome:
    outcome = Outcome(sent=time.perf_counter())
    rpc = stub.Generate(call.request, timeout=call.deadline)
    limit = call.cancel_after
    try:
        if limit == 0:
            rpc.cancel()
        async for delta in rpc:
            if delta.token_ids:
                outcome.last = time.perf_counter()
                outcome.first = outcome.first or outcome.last
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


def _check(options: Options) -> None:
    if options.address and options.serve_options:
        raise ConfigError(
            "options of peagle-serve go to a server that is started here: drop --address"
        )
    if options.address and options.overhead:
        raise ConfigError("--overhead needs the server's model in this process too: drop --address")
    if options.overhead and (options.rate or options.cancel_share or options.deadline_ms):
        raise ConfigError("--overhead compares whole requests at a fixed --concurrency only")
    for name, share in (
        ("cancel-share", options.cancel_share),
        ("constrained", options.constrained),
    ):
        if not 0 <= share <= 1:
            raise ConfigError(f"--{name} {share} must lie between 0 and 1")


def _options(options: Options) -> list[str]:
    """Options of the server that this command starts.

    By default it has a slot for every request, and no prefix cache, because prompts repeat.
    """
    slots = [] if options.rate else ["--max-num-seqs", str(max(options.concurrency))]
    cache = ["--no-cache"] if options.no_cache else []
    return [*slots, *cache, "--no-prefix-caching", *options.serve_options]


@contextlib.contextmanager
def _served(options: Options) -> Iterator[tuple[str, Served | None]]:
    """The address to load, and the server if this command starts one; it stops at the end of the block."""
    if options.address:
        yield options.address, None
        return
    resolve(_options(options))  # validates the options before the server starts
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "serve.log")
        with Served(_options(options), log=log) as server:
            yield server.wait(), server
            if code := server.stop():
                raise ConfigError(
                    f"peagle-serve ended with exit code {code}: {server.text()[-2000:]}"
                )


def _about(address: str) -> pb.GetModelInfoResponse:
    with grpc.insecure_channel(address) as channel:
        try:
            return GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10.0)
        except grpc.RpcError as error:
            raise ConfigError(
                f"{address}: no answer from peagle.v1.Generation ({error.code().name}: "
                f"{error.details()}); give the address of a running peagle-serve"
            ) from error


def _prompts(
    options: Options, about: pb.GetModelInfoResponse, engine: Engine | None
) -> tuple[Prompts, int]:
    """Prompts of the load, and the number of those left out because the bare engine cannot run them.

    Without a bare engine none is left out; the server refuses them.
    """
    if options.set == "random":
        rng = np.random.default_rng(options.seed)
        most = options.prompt_tokens
        lengths = rng.integers(max(1, most // 2), most + 1, options.num_requests or 256)
        return [rng.integers(0, about.vocab_size, length).tolist() for length in lengths], 0
    tokenizer = None if engine is None else engine.tokenizer
    name, prompts = prompt_set(
        options.set, tokenizer, prompt_tokens=options.prompt_tokens, limit=None
    )
    if not about.has_tokenizer and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"{about.name} is served without a tokenizer: use --set random")
    if engine is None:
        return prompts, 0
    return leave_out(name, prompts, lambda prompt: engine.validate(prompt, SamplingParams()))


def serve_load(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows.

    Raises:
      ConfigError: options that exclude each other, no server at the address, or a server that does not start.
    """
    _check(options)
    engine = _bare(options) if options.overhead else None
    cells = (
        [(None, rate) for rate in options.rate]
        if options.rate
        else [(c, None) for c in options.concurrency]
    )
    counts = [options.num_requests or max(32, 4 * (c or 16)) for c, _ in cells]
    done = []
    with _served(options) as (address, server):
        about = _about(address)
        prompts, left_out = _prompts(options, about, engine)
        total = sum(counts) * (2 * options.repeats if options.overhead else 1)
        with tqdm(total=total, unit="request", disable=None) as bar:
            for (concurrency, rate), count in zip(cells, counts, strict=True):
                bar.set_description(f"x{concurrency}" if rate is None else f"{rate:g}/s")
                todo = calls(options, prompts, count, rate=rate)
                _warm_up(address, todo, concurrency or 1)
                if engine is None:
                    found = _measure(options, address, todo, concurrency, bar)
                else:
                    found = _beside_bare(options, server, todo, concurrency, engine, bar)
                row = {
                    "kind": "serve-load",
                    **_identity(options, about, concurrency, rate),
                    **found,
                    "prompts_left_out": left_out,
                    **environment,
                }
                done.append(rows.rounded(row))
                rows.append(options.out, done[-1])
    return done


def _identity(options: Options, about, concurrency: int | None, rate: float | None) -> dict:
    return {
        "model": about.name,
        "dtype": about.dtype,
        "set": options.set,
        "method": about.method,
        "num_speculative_tokens": about.num_speculative_tokens,
        "max_num_seqs": about.max_num_seqs,
        "concurrency": concurrency,
        "rate": rate,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "cancel_share": options.cancel_share,
        "constrained_share": options.constrained,
        "deadline_ms": options.deadline_ms,
        "seed": options.seed,
    }


def _warm_up(address: str, todo: Sequence[Call], concurrency: int) -> None:
    """Whole requests of a few tokens: the first ones pay for connections and allocations.

    Waits first until the server has compiled all batch sizes.
    """
    with grpc.insecure_channel(address) as channel:
        stub = GenerationStub(channel)
        while stub.GetStats(pb.GetStatsRequest()).batch_sizes_pending:
            time.sleep(0.1)
    short = []
    for call in todo[:concurrency]:
        request = pb.GenerateRequest()
        request.CopyFrom(call.request)
        request.stopping.max_tokens = min(_WARM_UP_TOKENS, request.stopping.max_tokens)
        short.append(Call(request=request))
    asyncio.run(load(address, short, concurrency=concurrency))


def _measure(
    options: Options, address: str, todo: Sequence[Call], concurrency: int | None, bar: tqdm
) -> dict:
    outcomes, seconds = asyncio.run(
        load(address, todo, concurrency=concurrency, on_done=bar.update)
    )
    return figures(outcomes, seconds, options.limits)


def _bare(options: Options) -> Engine:
    """An engine with the settings of the server, in this process."""
    settings, _ = resolve(_options(options))
    engine = make_engine(settings)
    runs.warm_up(engine)
    return engine


def _beside_bare(
    options: Options,
    server: Served,
    todo: Sequence[Call],
    concurrency: int,
    engine: Engine,
    bar: tqdm,
) -> dict:
    """Alternates service and bare engine, so that other load affects both; medians of the repeats.

    The overhead is the median of the ratios per turn: both halves of a turn are adjacent in time, so
    varying load changes a ratio less than either median. CPU time of server, clients and bare engine
    shows the service's own cost even under other load.
    """
    runs_: dict[str, list] = {name: [] for name in ("served", "bare")}
    cpu: dict[str, list[float]] = {name: [] for name in ("served", "clients", "bare")}
    for _ in range(options.repeats):
        before = server.cpu_seconds, time.process_time()
        runs_["served"].append(
            asyncio.run(load(server.address, todo, concurrency=concurrency, on_done=bar.update))
        )
        cpu["served"].append(server.cpu_seconds - before[0])
        between = time.process_time()
        cpu["clients"].append(between - before[1])
        runs_["bare"].append(_drive(options, todo, concurrency, engine, bar))
        cpu["bare"].append(time.process_time() - between)
    seconds = [one[1] for one in runs_["served"]]
    bare_seconds = [one.seconds for one in runs_["bare"]]
    overheads = [100 * (one / bare - 1) for one, bare in zip(seconds, bare_seconds, strict=True)]
    middle, bare_middle = statistics.median(seconds), statistics.median(bare_seconds)
    outcomes = min(runs_["served"], key=lambda one: abs(one[1] - middle))[0]
    outputs = runs_["bare"][0].outputs
    return figures(outcomes, middle, options.limits) | {
        "bare_seconds": bare_middle,
        "bare_tokens_per_second": sum(map(len, outputs)) / bare_middle,
        "overhead_percent": statistics.median(overheads),
        "overhead_percent_all": overheads,
        "outputs_equal_to_bare": sum(
            outcome.tokens == tokens for outcome, tokens in zip(outcomes, outputs, strict=True)
        ),
        "served_seconds_all": seconds,
        "bare_seconds_all": bare_seconds,
        **{f"{name}_cpu_seconds": statistics.median(times) for name, times in cpu.items()},
    }


def _drive(
    options: Options, todo: Sequence[Call], concurrency: int, engine: Engine, bar: tqdm
) -> Measurement:
    """The calls' prompts through the bare engine."""
    prompts = [prompt_of(call.request) for call in todo]
    free = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )
    settings, _ = resolve(_options(options))
    mix, rules = Mix(options.constrained), (engine, settings.reply_format)
    params = [mix.params(free, index, *rules) for index in range(len(todo))]
    return drive(engine, prompts, params, concurrency=concurrency, on_finished=bar.update)
