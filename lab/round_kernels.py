"""Kernels of a round with their counts and times, from a trace of `jax.profiler`.

`python -m lab.round_kernels [--trace DIR] OPTIONS`; OPTIONS are those of `peagle-bench
decode-step`. Each cell is traced for some rounds of a full batch.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from bench import decode_step
from bench.__main__ import PROGRAM
from bench.models import Models
from bench.presets import preset
from bench.timing import SETTLED, is_full
from lab.kernel_timing import latest_trace, launches_of, profiler_options
from peagle_jax.cli import runs
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams

_TOP = 25
_ROUNDS = 4
_NUMBER = re.compile(r"([._]\d+)+$")  # loop_add_fusion_12 is another use of loop_add_fusion


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel: number and microseconds per round, and share of all kernels'
    time.

    `op` is XLA's name of the operation of its longest launch.
    """

    name: str
    op: str
    count: float
    us: float
    share: float


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Kernels of the traced rounds, the longest first. Copies and memory fills are counted
    separately.

    `span_us` is the time from the first kernel's start to the last kernel's end, per round, and
    `busy` the share of it in which a kernel runs.
    """

    kernels: tuple[Kernel, ...]
    copies: float
    span_us: float
    busy: float

    @property
    def count(self) -> float:
        return sum(kernel.count for kernel in self.kernels)

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    def lines(self) -> list[list[str]]:
        """name, count, microseconds, share: for a table."""
        return [
            [
                kernel.name[:60],
                f"{kernel.count:g}",
                f"{kernel.us:.1f}",
                f"{100 * kernel.share:.1f} %",
            ]
            for kernel in self.kernels[:_TOP]
        ]


def profile_rounds(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    rounds: int,
    folder: Path | None = None,
) -> KernelTable | None:
    """Traces rounds of a full, settled batch, and drops the requests afterwards.

    Args:
      engine: warm and idle.
      prompts: one for each slot to fill.
      rounds: number of calls to trace; fewer if a request ends early.
      folder: keeps the trace; None deletes it.
    Returns:
      None if the trace shows no GPU, or the requests are too short for a settled round.
    """
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    settled = 0
    while settled < SETTLED and engine.has_work:
        settled = settled + 1 if is_full(engine, len(prompts)) else 0
        engine.step()
    with tempfile.TemporaryDirectory() as scratch:
        into = scratch if folder is None else str(folder)
        try:
            traced = _trace(engine, len(prompts), rounds, into)
        finally:
            for request in requests:
                engine.abort(request)
            while engine.has_work:
                engine.step()
        return read_trace(latest_trace(Path(into)), traced) if traced else None


def _trace(engine: Engine, concurrency: int, rounds: int, folder: str) -> int:
    """Writes a trace of `rounds` calls; returns its number of rounds."""
    traced = 0
    _drain()
    jax.profiler.start_trace(folder, profiler_options=profiler_options())
    try:
        for _ in range(rounds):
            if not is_full(engine, concurrency):
                break
            # As many rounds are committed as are dispatched; a call may have several.
            traced += max(1, len(engine.step()) // concurrency)
        _drain()
    finally:
        jax.profiler.stop_trace()
    return traced


def _drain() -> None:
    """Waits for the rounds in flight; the device runs its calls in order."""
    jnp.add(jnp.zeros(()), 1).block_until_ready()


def read_trace(path: Path, rounds: int) -> KernelTable | None:
    """Kernels of a trace that holds `rounds` rounds; None without a GPU in it."""
    kernels, copies = launches_of(path)
    if not kernels:
        return None
    total = sum(event["dur"] for event in kernels)
    grouped: dict[str, list[dict]] = {}
    for event in kernels:
        grouped.setdefault(_NUMBER.sub("", event["name"]), []).append(event)
    table = [
        Kernel(
            name=name,
            op=_op(max(some, key=lambda event: event["dur"])),
            count=len(some) / rounds,
            us=sum(event["dur"] for event in some) / rounds,
            share=sum(event["dur"] for event in some) / total,
        )
        for name, some in grouped.items()
    ]
    span, busy = _occupancy(kernels)
    return KernelTable(
        kernels=tuple(sorted(table, key=lambda kernel: -kernel.us)),
        copies=len(copies) / rounds,
        span_us=span / rounds,
        busy=busy / span if span else 0.0,
    )


def _op(event: dict) -> str:
    args = event.get("args", {})
    return str(args.get("tf_op") or args.get("hlo_op") or "")


def _occupancy(kernels: list[dict]) -> tuple[float, float]:
    """(span, time in which at least one kernel ran), in microseconds."""
    intervals = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy, end = 0.0, intervals[0][0]
    for start, stop in intervals:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return end - intervals[0][0], busy


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the kernels of each cell; 1 if a trace shows no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lab.round_kernels", description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="keep the traces here")
    own, rest = parser.parse_known_args(argv)
    _, options = PROGRAM.parse(["decode-step", *rest])
    options.check()
    variants = decode_step.variants(options)
    models = Models.random(
        preset(options.preset, options.layers),
        [variant.method for variant in variants],
        dtype=runs.choose_dtype(options.dtype),
        num_devices=options.tensor_parallel,
    )
    code = 0
    for variant in variants:
        for concurrency in options.concurrency:
            engine = decode_step.engine_of(models, options, variant, (concurrency,))
            engine.warm_up(only_greedy=decode_step.only_greedy(options, variant))
            prompts = decode_step.prompts_of(options, concurrency, models.target.config.vocab_size)
            found = profile_rounds(
                engine, prompts, options.params, rounds=_ROUNDS, folder=own.trace
            )
            print(f"{variant} x{concurrency}")
            if found is None:
                print("the trace shows no GPU, or requests were too short")
                code = 1
                continue
            print(runs.table(["kernel", "per round", "us per round", "share"], found.lines()))
            layers = models.target.config.num_layers
            print(
                f"{found.count:.0f} kernels a round, {found.count / layers:.1f} a layer; "
                f"{found.us:.0f} us of kernels in {found.span_us:.0f} us, the device busy for "
                f"{100 * found.busy:.0f} %"
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
