"""Kernels of a round with their counts and times, from a trace of `jax.profiler`."""

import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.timing import SETTLED, is_full
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams

_TOP = 25
_NUMBER = re.compile(r"([._]\d+)+$")  # loop_add_fusion_12 is another use of loop_add_fusion
_COPY = re.compile(r"mem(cpy|set)", re.IGNORECASE)


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

    def as_row(self, layers: int) -> dict:
        """The part of a row; `layers` of the target."""
        return {
            "kernels_per_round": self.count,
            "kernels_per_layer": self.count / layers,
            "copies_per_round": self.copies,
            "kernel_us_per_round": self.us,
            "device_busy": self.busy,
            "kernels": [vars(kernel) for kernel in self.kernels[:_TOP]],
        }

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


def profiler_options() -> jax.profiler.ProfileOptions:
    """A trace holds a million events. Python calls would leave no room for kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return options


def _drain() -> None:
    """Waits for the rounds in flight; the device runs its calls in order."""
    jnp.add(jnp.zeros(()), 1).block_until_ready()


def latest_trace(folder: Path) -> Path:
    """The newest `*.trace.json.gz` below a profiler's folder.

    Raises:
      FileNotFoundError: the profiler wrote none.
    """
    found = sorted(
        folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda p: p.stat().st_mtime
    )
    if not found:
        raise FileNotFoundError(f"{folder}: the profiler wrote no trace.json.gz")
    return found[-1]


def read_trace(path: Path, rounds: int) -> KernelTable | None:
    """Kernels of a Chrome trace (gzip, JSON) that holds `rounds` rounds; None without a GPU in
    it."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    launches = _launches(events)
    kernels = [event for event in launches if not _COPY.search(event["name"])]
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
        copies=(len(launches) - len(kernels)) / rounds,
        span_us=span / rounds,
        busy=busy / span if span else 0.0,
    )


def _launches(events: list[dict]) -> list[dict]:
    """Complete events on the streams of GPUs.

    A GPU's process may also have tracks that repeat the launches by module, operation or step. If
    there are streams, only these count.
    """
    named = lambda kind: {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == kind
    }
    gpus = {pid for (pid, _), name in named("process_name").items() if "/device:GPU" in name}
    tracks = {where: name for where, name in named("thread_name").items() if where[0] in gpus}
    streams = {where for where, name in tracks.items() if name.startswith("Stream")} or set(tracks)
    return [
        event
        for event in events
        if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams
    ]


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
