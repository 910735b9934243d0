"""Times calls of a kernel: by the clock, and short ones by a trace of the GPU.

Each call has its own arguments and follows the one before on the GPU's stream. What a call writes
in place is a result of the call before, so that XLA copies nothing.
"""

import gzip
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

_COPY = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_REPEATS = 5
_SECONDS = 0.03  # of a repeat
SHORT = 200e-6
"""Seconds of a call below which the host may take longer than the GPU: it takes 10 to 100 us to
launch a program."""
_TRACED_CALLS = 500  # at most
_TRACED_SECONDS = 0.02  # of all calls, of which a reference may have hundreds of kernels each


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call, of `calls` calls in turn.

    Attributes:
      timed_by: "clock" of the host, from the first call to the last; or "trace", the sum of the
        kernels' times, without copies, fills and the gaps between them.
    """

    seconds: float
    calls: int
    timed_by: Literal["clock", "trace"]


class Program:
    """A function that is compiled for arguments of the given shapes."""

    def __init__(self, function: Callable, shapes: tuple, options: Mapping | None = None):
        """Compiles; `options` are XLA's."""
        self._results = jax.eval_shape(function, *shapes)
        self._links = _links(shapes, self._results)
        tree = jax.tree.structure(shapes)

        def program(carried, others):
            by_place, rest = dict(zip(self._links, carried, strict=True)), iter(others)
            leaves = [by_place[i] if i in by_place else next(rest) for i in range(tree.num_leaves)]
            made = jax.tree.leaves(function(*tree.unflatten(leaves)))
            linked = [made[j].reshape(leaves[i].shape) for i, j in self._links.items()]
            return linked, _without(made, self._links.values())

        lowered = jax.jit(program, donate_argnums=0).lower(*self._parted(shapes))
        self._run = lowered.compile(compiler_options=options and dict(options))

    def _parted(self, args: tuple) -> tuple[list, list]:
        """The leaves that a call before makes, and the others."""
        leaves = jax.tree.leaves(args)
        return [leaves[i] for i in self._links], _without(leaves, self._links)

    def __call__(self, *args: Any) -> Any:
        """The results; the arguments remain."""
        carried, others = self._parted(args)
        linked, kept = self._run([leaf.copy() for leaf in carried], others)
        by_place, rest = dict(zip(self._links.values(), linked, strict=True)), iter(kept)
        made = [
            by_place[j].reshape(shape.shape) if j in by_place else next(rest)
            for j, shape in enumerate(jax.tree.leaves(self._results))
        ]
        return jax.tree.unflatten(jax.tree.structure(self._results), made)

    def time(self, copies: Sequence[tuple], *, trace_below: float = 0.0) -> Timing:
        """Times calls with the arguments of each copy.

        Calls of fewer seconds than `trace_below` are timed by a trace, if it shows a GPU.
        """
        copies = [self._parted(args) for args in copies]
        carried = [leaf.copy() for leaf in copies[0][0]]

        def seconds(turns: int) -> float:
            nonlocal carried
            start = time.perf_counter()
            for _ in range(turns):
                for _, others in copies:
                    carried, results = self._run(carried, others)
            jax.block_until_ready((carried, results))
            return time.perf_counter() - start

        seconds(1)
        turns = max(1, round(_SECONDS / seconds(1)))
        best = min(seconds(turns) for _ in range(_REPEATS)) / turns / len(copies)
        most = min(_TRACED_CALLS, _TRACED_SECONDS / best)
        traced = None
        if best < trace_below:
            traced = _traced(seconds, len(copies), turns=max(1, int(most / len(copies))))
        return Timing(
            seconds=best if traced is None else traced,
            calls=len(copies),
            timed_by="clock" if traced is None else "trace",
        )


def _traced(run: Callable[[int], Any], calls: int, turns: int) -> float | None:
    """Seconds of all kernels of a call, from a trace of `run(turns)`, which has `calls` calls in
    each turn.

    None if the trace shows no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=profiler_options())
        try:
            run(turns)
        finally:
            jax.profiler.stop_trace()
        kernels, _ = launches_of(latest_trace(Path(folder)))
    return 1e-6 * sum(event["dur"] for event in kernels) / (turns * calls) if kernels else None


def profiler_options() -> jax.profiler.ProfileOptions:
    """A trace holds a million events. Python calls would leave no room for kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return options


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


def launches_of(path: Path) -> tuple[list[dict], list[dict]]:
    """(kernels, copies and memory fills) on the streams of GPUs in a Chrome trace (gzip, JSON)."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        launches = _launches(json.load(file)["traceEvents"])
    are_copies = [bool(_COPY.search(event["name"])) for event in launches]
    of = lambda kind: [
        one for one, is_copy in zip(launches, are_copies, strict=True) if is_copy is kind
    ]
    return of(False), of(True)


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


def _links(args: tuple, results: Any) -> dict[int, int]:
    """Maps leaves of the arguments to results of the call before with equal shape and dtype, in
    order.

    If there are too many results, the last ones are used, because they are ready last.
    """
    links: dict[int, int] = {}
    leaves, made = jax.tree.leaves(args), jax.tree.leaves(results)
    kind = lambda x: (math.prod(x.shape), x.dtype)
    for alike in dict.fromkeys(map(kind, made)):
        takers = [i for i, leaf in enumerate(leaves) if kind(leaf) == alike and len(leaf.shape) > 1]
        givers = [j for j, result in enumerate(made) if kind(result) == alike]
        links |= zip(takers, givers[-len(takers) :], strict=False)
    return links


def _without(leaves: Sequence, places: Collection[int]) -> list:
    return [leaf for i, leaf in enumerate(leaves) if i not in places]
