"""`peagle-bench serve-load`: load test of a running server."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from tqdm import tqdm

from bench import preset_load, rows
from bench.commands.serve_load import Options
from bench.constraints import Mix
from bench.latency import figures, gap_figures
from bench.load_clients import Call, Clients, Loaded
from bench.progress import progress_bar
from bench.served import Served
from bench.sweep import Prompts, prompt_set
from peagle_jax import ConfigError
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_DISTINCT = 16  # calls for each client of a run with a --duration, which repeats them
_SHORTEST = 4  # the part of the longest prompt and output that the shortest has


Load = Callable[..., Loaded]
"""`Clients.load` of one server, protocol and concurrency."""


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
        request = _request(prompt, options, mix, index)
        if options.duration is not None:
            request.stopping.max_tokens = _mixed(rng, options.max_tokens)
        made.append(
            Call(
                request=request,
                start=start,
                cancel_after=int(rng.integers(0, options.max_tokens)) if is_cancelled else None,
                deadline=None if options.deadline_ms is None else options.deadline_ms / 1e3,
            )
        )
    return made


def _mixed(rng: np.random.Generator, most: int) -> int:
    return int(rng.integers(-(-most // _SHORTEST), most + 1))


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


def _check(options: Options) -> None:
    if options.address and options.serve_options:
        raise ConfigError(
            "options of peagle-serve go to a server that is started here: drop --address"
        )
    if "http" in options.protocols and (
        options.address or options.cancel_share or options.deadline_ms or options.constrained
    ):
        raise ConfigError(
            "--protocols http is for whole free requests to a server that is started here"
        )
    if options.duration and options.rate:
        raise ConfigError("--duration is for a fixed --concurrency: leave out --rate")
    preset_load.check(options)
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
    http = ["--http-port", "0"] if "http" in options.protocols else []
    return [*slots, *cache, *http, "--no-prefix-caching", *options.serve_options]


@contextlib.contextmanager
def _served(options: Options) -> Iterator[tuple[str, Served | None]]:
    """The address to load, and the server if this command starts one; it stops at the end of the block."""
    if options.address:
        yield options.address, None
        return
    resolve(_options(options))  # validates the options before the server starts
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "serve.log")
        with preset_load.served(options, _options(options), log) as server:
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


def _prompts(options: Options, about: pb.GetModelInfoResponse) -> Prompts:
    """Prompts of the load; the server refuses those that it cannot run."""
    if options.set == "random":
        rng = np.random.default_rng(options.seed)
        most, count = options.prompt_tokens, options.num_requests or 256
        if options.duration is not None:
            lengths = [_mixed(rng, most) for _ in range(count)]
        elif options.preset is not None:
            lengths = [most] * count
        else:
            lengths = rng.integers(max(1, most // 2), most + 1, count)
        return [rng.integers(0, about.vocab_size, length).tolist() for length in lengths]
    _, prompts = prompt_set(options.set, None, prompt_tokens=options.prompt_tokens, limit=None)
    if not about.has_tokenizer and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"{about.name} is served without a tokenizer: use --set random")
    return prompts


def serve_load(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows.

    Raises:
      ConfigError: options that exclude each other, no server at the address, or a server that does not start.
    """
    _check(options)
    if options.preset is not None:
        options = replace(options, set="random", ignore_eos=True)
    measured: list[preset_load.Measured] = []
    done: list[dict] = []

    def write(row: dict) -> None:
        done.append(rows.rounded(row | environment))
        rows.append(options.out, done[-1])

    try:
        for one in _measured(options):
            if options.preset is None:
                write(one.row)
            else:
                measured.append(one)
        if measured and not options.no_bare:
            preset_load.add_bare(options, _options(options), measured)
    finally:  # rows of an interrupted run are kept
        for one in measured:
            write(one.row)
    return done


def _measured(options: Options) -> Iterator[preset_load.Measured]:
    """Each cell by each protocol, without the environment in its row."""
    cells = (
        [(None, rate) for rate in options.rate]
        if options.rate
        else [(c, None) for c in options.concurrency]
    )
    counts = [_count(options, c or 16) for c, _ in cells]
    timed = dict(total=sum(counts) * len(options.protocols), unit="request")
    if options.duration is not None:
        timed = dict(total=options.duration * len(cells) * len(options.protocols), unit="s")
    stored = preset_load.stored(options)
    with _served(options) as (address, server), Clients(options.client_processes) as clients:
        about = _about(address)
        started = {}
        if options.preset is not None:
            started = preset_load.start_times(options, server, stored)
        prompts = _prompts(options, about)
        addresses = {"grpc": address, "http": "" if server is None else server.http_address}
        with progress_bar(**timed) as bar:
            for (concurrency, rate), count in zip(cells, counts, strict=True):
                todo = calls(options, prompts, count, rate=rate)
                for protocol in options.protocols:
                    bar.set_description(
                        f"{protocol} {f'x{concurrency}' if rate is None else f'{rate:g}/s'}"
                    )
                    load = partial(
                        clients.load,
                        address=addresses[protocol],
                        protocol=protocol,
                        concurrency=concurrency,
                    )
                    _warm_up(address, load, todo[: concurrency or 1])
                    found, outputs = _measure(options, server, load, todo, bar)
                    row = {
                        "kind": "serve-load" if options.preset is None else "served",
                        **_identity(options, about, concurrency, rate),
                        "protocol": protocol,
                        **preset_load.identity(options, about),
                        **started,
                        **found,
                    }
                    yield preset_load.Measured(row=row, todo=todo, outputs=outputs)


def _count(options: Options, clients: int) -> int:
    """Requests of a cell; of a run with a duration those that it repeats."""
    if options.duration is not None:
        return _DISTINCT * clients
    return options.num_requests or max(32, 4 * clients)


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


def _warm_up(address: str, load: Load, todo: Sequence[Call]) -> None:
    """Whole requests of a few tokens: the first ones pay for connections and allocations.

    Waits first until the server has compiled all batch sizes.
    """
    preset_load.wait_for_programs(address)
    load([preset_load.shortened(call) for call in todo], concurrency=len(todo))


def _measure(
    options: Options, server: Served | None, load: Load, todo: Sequence[Call], bar: tqdm
) -> tuple[dict, list[list[int]]]:
    """Row fields, and the token ids of the texts."""
    with preset_load.watched(options, server) as found:
        loaded = _load(options, load, todo, bar)
    row = (
        figures(loaded.outcomes, loaded.seconds, options.limits)
        | gap_figures(loaded.outcomes, loaded.begin)
        | {"clients_cpu_seconds": loaded.cpu_seconds}
        | found
    )
    return row, [list(outcome.tokens) for outcome in loaded.outcomes]


def _load(options: Options, load: Load, todo: Sequence[Call], bar: tqdm) -> Loaded:
    if options.duration is None:
        return load(todo, on_done=bar.update)
    begin, before = time.monotonic(), bar.n

    def show() -> None:
        bar.update(before + min(options.duration, int(time.monotonic() - begin)) - bar.n)

    return load(todo, seconds=options.duration, on_second=show)
