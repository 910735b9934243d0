"""`peagle-bench serve-load --preset`: a server of a full-size model with random weights, and the bare engine beside it."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import grpc

from bench import server_processes
from bench.bare_engine import Cell, in_child, measure
from bench.commands.serve_load import Options
from bench.load_clients import Call
from bench.presets import preset
from bench.random_server import RandomModel
from bench.served import Served
from peagle_jax.config import ConfigError
from peagle_jax.sampling_params import SamplingParams
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from serving.sources import resolve

_POLL = 0.1
_WARM_UP_TOKENS = 64
_BARE = ("tokens_per_second", "ms_per_round", "ttft_ms_median", "acceptance_length")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The row of a cell by one protocol, without its environment, and its calls.

    `outputs` are the token ids of the texts, where clients get them.
    """

    row: dict
    todo: Sequence[Call]
    outputs: Sequence[Sequence[int]]


def check(options: Options) -> None:
    """Raises `ConfigError` for options that a preset excludes, or that are for presets only."""
    if options.preset is None:
        for name in ("layers", "synthetic_acceptance_length", "duration", "lock_shares", "no_bare"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs a --preset")
        return
    preset(options.preset, options.layers)
    if options.address or options.constrained or options.cancel_share:
        raise ConfigError(
            "--preset starts a server of its own for whole free requests: leave out --address, "
            "--constrained and --cancel-share"
        )


def model_of(options: Options) -> RandomModel:
    return RandomModel(
        preset=options.preset,
        layers=options.layers,
        synthetic_acceptance_length=options.synthetic_acceptance_length,
        seed=options.seed,
    )


def served(options: Options, serve_options: Sequence[str], log: Path) -> Served:
    """The server of the options, whose start has begun."""
    if options.preset is None:
        return Served(serve_options, log=log)
    given = [*model_of(options).options, *serve_options]
    return Served(given, log=log, module="bench.random_server")


def wait_for_programs(address: str) -> None:
    """Returns once the server has compiled all batch sizes."""
    with grpc.insecure_channel(address) as channel:
        stub = GenerationStub(channel)
        while stub.GetStats(pb.GetStatsRequest()).batch_sizes_pending:
            time.sleep(_POLL)


def _num_pages(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return GenerationStub(channel).GetStats(pb.GetStatsRequest()).kv_pages_total


def identity(options: Options, about: pb.GetModelInfoResponse) -> dict:
    """Further row fields that identify the measurement."""
    if options.preset is None:
        return {}
    chosen = preset(options.preset, options.layers)
    return {
        "model": chosen.name,
        "weights": chosen.weights,
        "layers": chosen.target.num_layers,
        "kv_cache_dtype": settings_of(options).kv_cache_dtype,
        "activations": settings_of(options).activations,
        "synthetic_acceptance_length": options.synthetic_acceptance_length,
        "set": "random tokens",
        "prompt_tokens": options.prompt_tokens,
        "duration": options.duration,
        "client_processes": options.client_processes,
        "api_processes": settings_of(options).num_servers,
    }


def settings_of(options: Options):
    return resolve(options.serve_options)[0]


@contextlib.contextmanager
def watched(options: Options, server: Served | None) -> Iterator[dict]:
    """Gives row fields about the server's processes within the block, once it has ended; none without a preset."""
    found: dict = {}
    if options.preset is None:
        yield found
        return
    before = server_processes.processes(server.process.pid)
    shares = None
    if options.lock_shares:
        shares = server_processes.LockShares(before, server.log.parent)
    yield found
    if shares is not None:
        found["lock_shares"] = shares.note or shares.end()
    now = server_processes.processes(server.process.pid)
    found["processes"] = server_processes.used(before, now)


def shortened(call: Call) -> Call:
    """The call for a warm-up: at once, and with a few tokens, after which the choice of K has settled."""
    request = pb.GenerateRequest()
    request.CopyFrom(call.request)
    request.stopping.max_tokens = min(_WARM_UP_TOKENS, request.stopping.max_tokens)
    return Call(request=request)


def add_bare(options: Options, serve_options: Sequence[str], measured: Sequence[Measured]) -> None:
    """Adds to the rows what the bare engine does with the same calls. The server must have ended."""
    by_load = {(one.row["concurrency"], one.row["rate"]): one for one in measured}
    cells = [_cell(one) for one in by_load.values()]
    num_pages = measured[0].row["kv_pages"] + 1  # and the dummy page
    found = in_child(measure, model_of(options), list(serve_options), num_pages, cells)
    for load, bare in zip(by_load, found, strict=True):
        for one in measured:
            if (one.row["concurrency"], one.row["rate"]) == load:
                one.row.update({f"bare_{name}": bare[name] for name in _BARE})
                speeds = one.row["tokens_per_second"], bare["tokens_per_second"]
                one.row["served_over_bare"] = speeds[0] / speeds[1]
                # A synthetic acceptance follows the seeds, which a server draws anew.
                has_own_texts = options.synthetic_acceptance_length is None
                if has_own_texts and options.temperature == 0 and any(one.outputs):
                    one.row.update(_compared(one.outputs, bare["outputs"]))


def _compared(served: Sequence[Sequence[int]], bare: Sequence[Sequence[int]]) -> dict:
    """Row fields about greedy texts, which must be those of the bare engine whatever else is served beside them."""
    pairs = [pair for texts in zip(served, bare, strict=True) for pair in zip_longest(*texts)]
    differing = sum(a != b for a, b in pairs)
    return {"tokens_compared": len(pairs), "tokens_differing": differing}


def _cell(one: Measured) -> Cell:
    concurrency = one.row["concurrency"]
    params = lambda call: SamplingParams(
        max_tokens=call.request.stopping.max_tokens,
        temperature=call.request.sampling.temperature,
        ignore_eos=True,
    )
    return Cell(
        prompts=[list(call.request.tokens.ids) for call in one.todo],
        params=[params(call) for call in one.todo],
        warm_up=[params(shortened(call)) for call in one.todo[: concurrency or 1]],
        concurrency=concurrency,
        starts=None if concurrency is not None else [call.start for call in one.todo],
    )


def stored(options: Options) -> dict[Path, float]:
    """Programs on disk, of any engine, with the times of their last use."""
    if options.no_cache:
        return {}
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle-jax"
    return {path: path.stat().st_mtime for path in folder.glob("programs/*.program")}


def start_times(options: Options, server: Served, before: dict[Path, float]) -> dict:
    """Row fields: seconds from the start of a server to its port, to SERVING, and until all programs are compiled;
    how many of these programs were on disk `before`; pages of the KV cache."""
    wait_for_programs(server.address)
    now = stored(options)
    return {
        "programs_on_disk": sum(now.get(path, 0) > used for path, used in before.items()),
        "port_seconds": server.port_seconds,
        "serving_seconds": server.serving_seconds,
        "programs_seconds": time.monotonic() - server.started,
        "kv_pages": _num_pages(server.address),
    }
