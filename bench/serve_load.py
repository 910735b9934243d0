"""`peagle-bench serve-load`: load test of a server of a full-size model with random weights. The
bare engine gets the same requests afterwards.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from tqdm import tqdm

from bench import rows
from bench.cells import progress_bar
from bench.command import RESULTS, Command, option
from bench.load_clients import Call, Clients, Loaded, figures, gap_figures
from bench.presets import preset
from bench.printed import show
from bench.random_server import Cell, in_child, measure_bare
from bench.served import Served, ServerOptions, processes, used, wait_for_programs
from peagle_jax import ConfigError
from peagle_jax.sampling_params import SamplingParams
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_WARM_UP_TOKENS = 64
_CLIENT_PROCESSES = 6  # at most
_BARE = ("tokens_per_second", "ms_per_round", "ttft_ms_median", "acceptance_length")


def _list_of_rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted({float(item) for item in text.split(",")}))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be positive")
    return rates


def _protocols(text: str) -> tuple[str, ...]:
    if unknown := set(names := text.split(",")) - {"grpc", "http"}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} must be grpc or http")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of this command.

    Args:
      preset: full-size model that is served with random weights
      protocols: how clients call the server, one row each: grpc, http (streams of /v1/completions)
      concurrency: numbers of clients, each with one request after the other
      rate: requests per second that arrive at random (Poisson), instead of --concurrency
      num_requests: requests at each concurrency or rate; four per client without it
      minutes: clients of --concurrency send requests of mixed lengths, down to a quarter of
        --prompt-tokens and --max-tokens, for this time; without the bare engine
      prompt_tokens: random token ids of each prompt
      seed: seed of arrivals, prompts and random weights
    """

    preset: str = option()
    protocols: tuple[str, ...] = option(("grpc",), type=_protocols, nargs=None, metavar="P,P")
    concurrency: tuple[int, ...] = option((1, 8, 32), excludes="load")
    rate: tuple[float, ...] = option(
        (), excludes="load", type=_list_of_rates, nargs=None, metavar="R,R"
    )
    num_requests: int | None = option(None, excludes="length")
    minutes: float | None = option(None, excludes="length")
    max_tokens: int = 128
    prompt_tokens: int = 128
    temperature: float = 0.0
    out: Path = RESULTS / "serve_load.jsonl"

    def environment(self) -> dict:
        """Fields of all rows. The server holds the memory of the device, which this process must
        not use."""
        return in_child(rows.environment, self.commit)

    @property
    def cells(self) -> list[tuple[int | None, float | None]]:
        """(concurrency, rate) of each cell, of which one is None."""
        if self.rate:
            return [(None, rate) for rate in self.rate]
        return [(concurrency, None) for concurrency in self.concurrency]

    @property
    def server_options(self) -> list[str]:
        """Options of the server that this command starts: by default it has a slot for every
        request, and no prefix cache, because prompts repeat."""
        slots = [] if self.rate else ["--max-num-seqs", str(max(self.concurrency))]
        cache = ["--no-cache"] if self.no_cache else []
        http = ["--http-port", "0"] if "http" in self.protocols else []
        return [*slots, *cache, *http, "--no-prefix-caching", *self.serve_options]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The row of a cell by one protocol, without its environment, and its calls.

    `outputs` are the token ids of the texts, where clients get them.
    """

    row: dict
    todo: Sequence[Call]
    outputs: Sequence[Sequence[int]]


def run(options: Options) -> int:
    """Measures, a row each, and prints them."""
    if options.minutes is not None and (options.rate or not 0 < options.minutes < float("inf")):
        raise ConfigError("--minutes is a positive time for clients of --concurrency, not --rate")
    environment = options.environment()
    measured: list[Measured] = []
    done: list[dict] = []
    try:
        for one in _measured(options):
            measured.append(one)
        if options.minutes is None:
            _add_bare(options, measured)
    finally:  # rows of an interrupted run are kept
        for one in measured:
            done.append(rows.rounded(one.row | environment))
            rows.append(options.out, done[-1])
    show("serve-load", done, options.out)
    return 0


def _measured(options: Options) -> Iterator[Measured]:
    """Each cell by each protocol, without the environment in its row."""
    at_most = [concurrency or 16 for concurrency, _ in options.cells]
    counts = [options.num_requests or max(32, 4 * clients) for clients in at_most]
    total = sum(counts) * len(options.protocols) if options.minutes is None else None
    stored = _stored(options)
    with _served(options) as server, Clients(_CLIENT_PROCESSES) as clients:
        about = _about(server.address)
        started = _start_times(options, server, stored)
        prompts = _prompts(options, about.vocab_size)
        addresses = {"grpc": server.address, "http": server.http_address}
        with progress_bar(total=total, unit="request") as bar:
            for (concurrency, rate), count in zip(options.cells, counts, strict=True):
                todo = calls(options, prompts, count, rate=rate)
                for protocol in options.protocols:
                    cell = f"x{concurrency}" if rate is None else f"{rate:g}/s"
                    bar.set_description(f"{protocol} {cell}")
                    load = partial(
                        clients.load,
                        address=addresses[protocol],
                        protocol=protocol,
                        concurrency=concurrency,
                    )
                    _warm_up(load, todo[: concurrency or 1])
                    if options.minutes is not None:
                        load = partial(load, seconds=60 * options.minutes)
                    found, outputs = _measure(server, load, todo, bar)
                    row = {
                        **_identity(options, about),
                        "concurrency": concurrency,
                        "rate": rate,
                        "protocol": protocol,
                        **started,
                        **found,
                    }
                    yield Measured(row=row, todo=todo, outputs=outputs)


def calls(
    options: Options, prompts: list[list[int]], count: int, *, rate: float | None = None
) -> list[Call]:
    """`count` calls over `prompts`; arrivals are drawn from the seed."""
    rng = np.random.default_rng(options.seed)
    starts = np.cumsum(rng.exponential(1 / rate, count)) if rate else [None] * count
    chosen = itertools.islice(itertools.cycle(prompts), count)
    made = []
    for prompt, start in zip(chosen, starts, strict=True):
        prompt_tokens, max_tokens = options.prompt_tokens, options.max_tokens
        if options.minutes is not None:
            prompt_tokens = int(rng.integers(1 + prompt_tokens // 4, prompt_tokens + 1))
            max_tokens = int(rng.integers(1 + max_tokens // 4, max_tokens + 1))
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=prompt[:prompt_tokens]),
            sampling=pb.Sampling(temperature=options.temperature),
            stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
        )
        made.append(Call(request=request, start=start))
    return made


@contextlib.contextmanager
def _served(options: Options) -> Iterator[Served]:
    """The server, which stops with the block."""
    with (
        tempfile.TemporaryDirectory() as folder,
        options.start(options.server_options, Path(folder, "serve.log")) as server,
    ):
        server.wait()
        yield server
        if code := server.stop():
            raise ConfigError(f"peagle-serve ended with exit code {code}: {server.text()[-2000:]}")


def _about(address: str) -> pb.GetModelInfoResponse:
    with grpc.insecure_channel(address) as channel:
        return GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10.0)


def _prompts(options: Options, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(options.seed)
    length, count = options.prompt_tokens, options.num_requests or 256
    return [rng.integers(0, vocab_size, length).tolist() for _ in range(count)]


def _identity(options: Options, about: pb.GetModelInfoResponse) -> dict:
    """Row fields that identify the measurement."""
    chosen, (settings, _) = preset(options.preset, options.layers), resolve(options.serve_options)
    return {
        "kind": "served",
        "model": chosen.name,
        "dtype": about.dtype,
        "weights": chosen.weights,
        "layers": chosen.target.num_layers,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "activations": settings.activations,
        "synthetic_acceptance_length": options.synthetic_acceptance_length,
        "set": "random tokens",
        "prompt_tokens": options.prompt_tokens,
        "duration": None if options.minutes is None else 60 * options.minutes,
        "method": about.method,
        "num_speculative_tokens": about.num_speculative_tokens,
        "max_num_seqs": about.max_num_seqs,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _stored(options: Options) -> dict[Path, float]:
    """Programs on disk, of any engine, with the times of their last use."""
    if options.no_cache:
        return {}
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle-jax"
    return {path: path.stat().st_mtime for path in folder.glob("programs/*.program")}


def _start_times(options: Options, server: Served, before: dict[Path, float]) -> dict:
    """Row fields: seconds from the start of a server to its port, to SERVING, and until all
    programs are compiled; how many of these programs were on disk `before`; pages of the KV
    cache."""
    stats = wait_for_programs(server.address)
    now = _stored(options)
    return {
        "kv_pages": stats.kv_pages_total,
        "programs_on_disk": sum(now.get(path, 0) > last for path, last in before.items()),
        "port_seconds": server.port_seconds,
        "serving_seconds": server.serving_seconds,
        "programs_seconds": time.monotonic() - server.started,
    }


def _shortened(call: Call) -> Call:
    """The call for a warm-up: at once, and with a few tokens, after which K has settled."""
    request = pb.GenerateRequest()
    request.CopyFrom(call.request)
    request.stopping.max_tokens = min(_WARM_UP_TOKENS, request.stopping.max_tokens)
    return Call(request=request)


def _warm_up(load: Callable[..., Loaded], todo: Sequence[Call]) -> None:
    """Whole requests of a few tokens: the first ones pay for connections and allocations."""
    load([_shortened(call) for call in todo], concurrency=len(todo))


def _measure(
    server: Served, load: Callable[..., Loaded], todo: Sequence[Call], bar: tqdm
) -> tuple[dict, list[list[int]]]:
    """Row fields, and the token ids of the texts."""
    before = processes(server.process.pid)
    loaded = load(todo, on_done=bar.update)
    row = (
        figures(loaded.outcomes, loaded.seconds)
        | gap_figures(loaded.outcomes, loaded.begin)
        | {
            "clients_cpu_seconds": loaded.cpu_seconds,
            "processes": used(before, processes(server.process.pid)),
        }
    )
    return row, [list(outcome.tokens) for outcome in loaded.outcomes]


def _add_bare(options: Options, measured: Sequence[Measured]) -> None:
    """Adds to the rows what the bare engine does with the same calls, after the server's end."""
    by_load = {(one.row["concurrency"], one.row["rate"]): one for one in measured}
    cells = [_bare_cell(one) for one in by_load.values()]
    num_pages = measured[0].row["kv_pages"] + 1  # and the dummy page
    found = in_child(measure_bare, options.random_model, options.server_options, num_pages, cells)
    for load, bare in zip(by_load, found, strict=True):
        for one in measured:
            if (one.row["concurrency"], one.row["rate"]) != load:
                continue
            one.row.update({f"bare_{name}": bare[name] for name in _BARE})
            speeds = one.row["tokens_per_second"], bare["tokens_per_second"]
            one.row["served_over_bare"] = speeds[0] / speeds[1]
            # A synthetic acceptance follows the seeds, which a server draws anew.
            has_own_texts = options.synthetic_acceptance_length is None
            if has_own_texts and options.temperature == 0 and any(one.outputs):
                one.row.update(_compared(one.outputs, bare["outputs"]))


def _compared(served: Sequence[Sequence[int]], bare: Sequence[Sequence[int]]) -> dict:
    """Row fields about greedy texts, which must be those of the bare engine whatever else is served
    beside them."""
    texts = zip(served, bare, strict=True)
    pairs = [pair for two in texts for pair in itertools.zip_longest(*two)]
    return {"tokens_compared": len(pairs), "tokens_differing": sum(a != b for a, b in pairs)}


def _bare_cell(one: Measured) -> Cell:
    concurrency = one.row["concurrency"]
    params = lambda call: SamplingParams(
        max_tokens=call.request.stopping.max_tokens,
        temperature=call.request.sampling.temperature,
        ignore_eos=True,
    )
    return Cell(
        prompts=[list(call.request.tokens.ids) for call in one.todo],
        params=[params(call) for call in one.todo],
        warm_up=[params(_shortened(call)) for call in one.todo[: concurrency or 1]],
        concurrency=concurrency,
        starts=None if concurrency is not None else [call.start for call in one.todo],
    )


COMMAND = Command(
    examples=(
        "serve-load --preset qwen3-0.6b --rate 4,8 -- --num-speculative-tokens 5",
        "serve-load --preset qwen3-coder-30b-a3b-fp8 --synthetic-acceptance-length 3.1 \\\n"
        "      --concurrency 1,8,32,128 --protocols grpc,http --prompt-tokens 512 \\\n"
        "      --max-tokens 256 --temperature 1",
    ),
    description="""
Starts a peagle-serve of a full-size model with random weights and made-up tokens, and sends it
random prompts by each of --protocols (gRPC, peagle.v1.Generation, or HTTP) from several client
processes. Options after -- are the server's. It has no prefix cache, because prompts repeat;
-- --prefix-caching turns it on. Rows have what clients see: latencies as p50/p90/p99, the gaps
between messages, tokens and requests per second and statuses; and the seconds of the start, and
memory and processor time of each process of the server. After the server has ended, an engine in a
process of its own gets the same requests in the same order and at the same concurrency or times.
""",
    options=Options,
    run=run,
    removed={
        "client-processes": "there are as many as clients, at most six; leave it out",
        "duration": "use --minutes",
        "no-bare": "use --minutes, which leaves it out",
        **dict.fromkeys(
            ("address", "set", "goodput", "ignore-eos"),
            "`vllm bench serve` and guidellm measure a server that runs (docs/serving.md)",
        ),
        **dict.fromkeys(("cancel-share", "constrained", "deadline-ms"), "requests are whole, free"),
        "overhead": "rows have the bare engine's tokens per second too",
        "repeats": "it was for --overhead; leave it out",
        "lock-shares": "run `py-spy record --gil` beside the command",
    },
)
