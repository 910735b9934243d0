"""Times calls of a kernel in one program: by the clock, and short ones by a trace of the GPU.

Each call has its own arguments, and depends on the call before, so that calls do not run concurrently.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench.kernel_times import latest_trace, read_trace

_REPEATS = 5
_SECONDS = 0.03  # of a repeat
SHORT = 100e-6
"""Seconds of a call below which the host may take longer than the GPU: a call takes 10 to 50 us on slow hosts."""
_TRACED_CALLS = 2000


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call, in programs of `calls` calls.

    Attributes:
      linked_by: how a call depends on the one before. "result": an argument is the result of the call before, at no
        cost. "sum": a small extra kernel links them; its time is not subtracted.
      timed_by: "clock" of the host, from the first call to the last; or "trace", the sum of the kernels' times, without
        the gaps between them.
    """

    seconds: float
    calls: int
    linked_by: str
    timed_by: Literal["clock", "trace"]


class Program:
    """A compiled program of `calls` calls of a function, whose arguments have the given shapes."""

    def __init__(self, function: Callable, shapes: tuple, calls: int):
        results = jax.eval_shape(function, *shapes)
        self._links = _links(shapes, results)
        leaves = jax.tree.leaves(shapes)

        def program(carried, copies):
            kept = []
            for args in copies:
                # The barrier prevents fusion with neighbouring calls.
                made = jax.lax.optimization_barrier(function(*_carry(carried, args, self._links)))
                results = jax.tree.leaves(made)
                linked = [results[j].reshape(leaves[i].shape) for i, j in self._links.items()]
                carried = linked or jnp.ravel(results[0])[:1]
                # Return all outputs, or XLA would remove their computation.
                kept += [x for j, x in enumerate(results) if j not in self._links.values()]
            return carried, kept

        self._zero = jax.ShapeDtypeStruct((1,), jax.tree.leaves(results)[0].dtype)
        carried = [leaves[i] for i in self._links] or self._zero
        lowered = jax.jit(program, donate_argnums=0).lower(carried, [shapes] * calls)
        self._run = lowered.compile()

    def time(self, copies: Sequence[tuple], *, trace_below: float = 0.0) -> Timing:
        """Times the program with the arguments of each call.

        Calls of fewer seconds than `trace_below` are timed by a trace, if it shows a GPU.
        """
        copies, leaves = list(copies), jax.tree.leaves(copies[0])
        carried = [jnp.copy(leaves[i]) for i in self._links]
        if not self._links:
            carried = jnp.zeros(self._zero.shape, self._zero.dtype)

        def seconds(turns: int) -> float:
            nonlocal carried
            start = time.perf_counter()
            for _ in range(turns):
                carried, kept = self._run(carried, copies)
            jax.block_until_ready((carried, kept))
            return time.perf_counter() - start

        seconds(1)
        turns = max(1, round(_SECONDS / seconds(1)))
        best = min(seconds(turns) for _ in range(_REPEATS)) / turns / len(copies)
        traced = _traced(seconds, len(copies)) if best < trace_below else None
        return Timing(
            seconds=best if traced is None else traced,
            calls=len(copies),
            linked_by="result" if self._links else "sum",
            timed_by="clock" if traced is None else "trace",
        )


def _traced(run: Callable[[int], Any], calls: int) -> float | None:
    """Seconds of all kernels of a call, from a trace of programs of `calls` calls; `run` takes their number.

    None if the trace shows no GPU.
    """
    turns = max(1, _TRACED_CALLS // calls)
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            run(turns)
        finally:
            jax.profiler.stop_trace()
        table = read_trace(latest_trace(Path(folder)), turns * calls)
    return None if table is None else 1e-6 * table.us


def _links(args: tuple, results: Any) -> dict[int, int]:
    """Maps leaves of the arguments to results of the call before with equal shape and dtype, in order.

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


def _carry(carried: Any, args: tuple, links: dict[int, int]) -> tuple:
    """Arguments that depend on the call before: some replaced by its results, or a zero added."""
    leaves, tree = jax.tree.flatten(args)
    for i, value in zip(links, carried, strict=False):
        leaves[i] = value.reshape(leaves[i].shape)
    if not links:
        floats = [i for i, leaf in enumerate(leaves) if leaf.dtype in (jnp.bfloat16, jnp.float32)]
        smallest = min(floats, key=lambda i: leaves[i].size)
        zero = 0 * carried[0].astype(leaves[smallest].dtype)
        leaves[smallest] = leaves[smallest] + zero
    return tree.unflatten(leaves)
