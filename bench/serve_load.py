"""`peagle-bench serve-load`: load test of a running server.

With `--preset` the server has a full-size model with random weights; the bare engine gets the same
requests afterwards.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from bench.sweep import Prompts, prompt_set
from peagle_jax import ConfigError
from peagle_jax.sampling_params import SamplingParams
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_WARM_UP_TOKENS = 64
_CLIENT_PROCESSES = 6  # at most
_BARE = ("tokens_per_second", "ms_per_round", "ttft_ms_median", "acceptance_length")
Load = Callable[..., Loaded]
"""`Clients.load` of one server, protocol and concurrency."""


def _list_of_rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted({float(item) for item in text.split(",")}))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be positive")
    return rates


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2e") or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2e:MS")
    return name, float(value)


def _protocols(text: str) -> tuple[str, ...]:
    if unknown := set(names := text.split(",")) - {"grpc", "http"}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} must be grpc or http")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of this command.

    Args:
      address: HOST:PORT of a running server; without it one is started
      preset: start a server of this full-size model with random weights, and measure the bare
        engine after it; rows of the kind served
      no_bare: leave out the bare engine beside a preset
      protocols: how clients call the server, one row each: grpc, http (streams of /v1/completions)
      concurrency: numbers of clients, each with one request after the other
      rate: requests per second that arrive at random (Poisson), instead of --concurrency
      set: prompts: HumanEval, MT-Bench, NAME=FILE (JSON lines), or random (token ids)
      num_requests: requests at each concurrency or rate; four per client without it
      prompt_tokens: tokens of the longest random prompt; of each one of a preset
      goodput: also count requests within these limits: ttft:MS (time to first token), tpot:MS (time
        per output token), e2e:MS (whole request)
      seed: seed of arrivals, prompts and random weights
    """

    address: str | None = None
    no_bare: bool = False
    protocols: tuple[str, ...] = option(("grpc",), type=_protocols, nargs=None, metavar="P,P")
    concurrency: tuple[int, ...] = option((1, 8, 32), excludes="load")
    rate: tuple[float, ...] = option(
        (), excludes="load", type=_list_of_rates, nargs=None, metavar="R,R"
    )
    set: str = "HumanEval"
    num_requests: int | None = None
    max_tokens: int = 128
    prompt_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    goodput: tuple[tuple[str, float], ...] = option((), type=_limit, metavar="NAME:MS")
    out: Path = RESULTS / "serve_load.jsonl"

    def check(self) -> None:
        super().check()
        if self.preset is not None and self.address:
            raise ConfigError("--preset starts a server of its own: leave out --address")
        if self.preset is None and self.no_bare:
            raise ConfigError("--no-bare needs a --preset")
        if self.address and self.serve_options:
            raise ConfigError(
                "options of peagle-serve go to a server that is started here: drop --address"
            )
        if "http" in self.protocols and self.address:
            raise ConfigError("--protocols http is for a server that is started here")

    def environment(self) -> dict:
        """Fields of all rows. A preset's server holds the memory of the device, which this process
        must not use."""
        if self.preset is None:
            return super().environment()
        return in_child(rows.environment, self.commit)

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds by name of a latency, for goodput."""
        return dict(self.goodput)

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
    done = serve_load(options, options.environment())
    show("serve-load", done, options.out)
    return 0


def serve_load(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows.

    Raises:
      ConfigError: no server at the address, or a server that does not start.
    """
    if options.preset is not None:
        options = replace(options, set="random", ignore_eos=True)
    measured: list[Measured] = []
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
            _add_bare(options, measured)
    finally:  # rows of an interrupted run are kept
        for one in measured:
            write(one.row)
    return done


def _measured(options: Options) -> Iterator[Measured]:
    """Each cell by each protocol, without the environment in its row."""
    counts = [_count(options, concurrency or 16) for concurrency, _ in options.cells]
    total = sum(counts) * len(options.protocols)
    stored = _stored(options)
    with _served(options) as (address, server), Clients(_CLIENT_PROCESSES) as clients:
        about = _about(address)
        started = {} if options.preset is None else _start_times(options, server, stored)
        prompts = _prompts(options, about)
        addresses = {"grpc": address, "http": "" if server is None else server.http_address}
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
                    _warm_up(address, load, todo[: concurrency or 1])
                    found, outputs = _measure(options, server, load, todo, bar)
                    row = {
                        **_identity(options, about, concurrency, rate),
                        "protocol": protocol,
                        **_preset_identity(options),
                        **started,
                        **found,
                    }
                    yield Measured(row=row, todo=todo, outputs=outputs)


def calls(
    options: Options, prompts: Prompts, count: int, *, rate: float | None = None
) -> list[Call]:
    """`count` calls over `prompts`; arrivals are drawn from the seed."""
    rng = np.random.default_rng(options.seed)
    starts = np.cumsum(rng.exponential(1 / rate, count)) if rate else [None] * count
    chosen = itertools.islice(itertools.cycle(prompts), count)
    return [
        Call(request=_request(prompt, options), start=start)
        for prompt, start in zip(chosen, starts, strict=True)
    ]


def _request(prompt: str | list[int], options: Options) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.Sampling(temperature=options.temperature),
        stopping=pb.Stopping(max_tokens=options.max_tokens, ignore_eos=options.ignore_eos),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    return request


@contextlib.contextmanager
def _served(options: Options) -> Iterator[tuple[str, Served | None]]:
    """The address to load, and the server if this command starts one; it stops with the block."""
    if options.address:
        yield options.address, None
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        options.start(options.server_options, Path(folder, "serve.log")) as server,
    ):
        yield server.wait(), server
        if code := server.stop():
            raise ConfigError(f"peagle-serve ended with exit code {code}: {server.text()[-2000:]}")


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
        if options.preset is not None:
            lengths = [most] * count
        else:
            lengths = rng.integers(max(1, most // 2), most + 1, count)
        return [rng.integers(0, about.vocab_size, length).tolist() for length in lengths]
    _, prompts = prompt_set(options.set, None, prompt_tokens=options.prompt_tokens, limit=None)
    if not about.has_tokenizer and any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"{about.name} is served without a tokenizer: use --set random")
    return prompts


def _count(options: Options, clients: int) -> int:
    return options.num_requests or max(32, 4 * clients)


def _identity(options: Options, about, concurrency: int | None, rate: float | None) -> dict:
    return {
        "kind": "serve-load" if options.preset is None else "served",
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
        "seed": options.seed,
    }


def _preset_identity(options: Options) -> dict:
    """Further row fields that identify the measurement of a preset."""
    if options.preset is None:
        return {}
    chosen, (settings, _) = preset(options.preset, options.layers), resolve(options.serve_options)
    return {
        "model": chosen.name,
        "weights": chosen.weights,
        "layers": chosen.target.num_layers,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "activations": settings.activations,
        "synthetic_acceptance_length": options.synthetic_acceptance_length,
        "set": "random tokens",
        "prompt_tokens": options.prompt_tokens,
        "api_processes": 1,
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


def _warm_up(address: str, load: Load, todo: Sequence[Call]) -> None:
    """Whole requests of a few tokens: the first ones pay for connections and allocations.

    Waits first until the server has compiled all batch sizes.
    """
    wait_for_programs(address)
    load([_shortened(call) for call in todo], concurrency=len(todo))


def _measure(
    options: Options, server: Served | None, load: Load, todo: Sequence[Call], bar: tqdm
) -> tuple[dict, list[list[int]]]:
    """Row fields, and the token ids of the texts."""
    before = {} if options.preset is None else processes(server.process.pid)
    loaded = load(todo, on_done=bar.update)
    row = (
        figures(loaded.outcomes, loaded.seconds, options.limits)
        | gap_figures(loaded.outcomes, loaded.begin)
        | {"clients_cpu_seconds": loaded.cpu_seconds}
    )
    if options.preset is not None:
        row["processes"] = used(before, processes(server.process.pid))
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
        "serve-load --concurrency 1,8,32 -- --num-speculative-tokens 5",
        "serve-load --address 127.0.0.1:50051 --rate 4,8 --goodput ttft:500 tpot:50",
        "serve-load --preset qwen3-coder-30b-a3b-fp8 --synthetic-acceptance-length 3.1 \\\n"
        "      --concurrency 1,8,32,128 --protocols grpc,http --prompt-tokens 512 \\\n"
        "      --max-tokens 256 --temperature 1",
    ),
    description="""
Sends requests to a peagle-serve (gRPC, peagle.v1.Generation, or HTTP) from several client processes
and reports what clients see: latencies as p50/p90/p99, tokens and requests per second, goodput
(requests per second within the limits of --goodput) and statuses. Without --address a server is
started on a free port; options after -- are that server's. It has no prefix cache, because prompts
repeat; -- --prefix-caching turns it on.

--preset starts a server of a full-size model with random weights and made-up tokens, and sends it
random prompts of --prompt-tokens tokens by each of --protocols. After the server has ended, an
engine in a process of its own gets the same requests in the same order and at the same concurrency
or times. Rows also hold the seconds of the start, the gaps between messages, and memory and
processor time of each process of the server.
""",
    options=Options,
    run=run,
    removed={
        "client-processes": "there are as many as clients, at most six; leave it out",
        "duration": "use --num-requests",
        **dict.fromkeys(
            ("cancel-share", "constrained", "deadline-ms"), "a load has whole free requests"
        ),
        "overhead": "use --preset, whose rows have the bare engine's tokens per second too",
        "repeats": "it was for --overhead; leave it out",
        "lock-shares": "run `py-spy record --gil` beside the command",
    },
)
