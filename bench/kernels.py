"""`peagle-bench kernels`: times each kernel against its XLA reference, on the shapes of real models.

A call takes microseconds, less than a launch from the host, so a program of many calls is timed. Each
call has its own arguments, so that weights come from device memory and not from the L2 cache, and depends
on the call before, so that calls do not run concurrently. Where calls are so short that the host may take longer
than the GPU, their time is that of their kernels in a trace. The cases are the specs of an operation, see
`bench.deviceless`. A `specs.py` may also have:

- `inputs(spec, key)`: arguments, if random values and zeros are invalid for the operation.
- `bytes(spec)`: bytes moved, if not every argument and result once.
- `configs(spec, device)`: tuning configs, passed to `build` as a second argument, the default first; may
  be empty.
"""

import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench import deviceless, rows
from bench.commands.kernels import Options
from bench.kernel_times import latest_trace, read_trace
from bench.roofline import CHIPS
from pallas_kernels import dispatch
from pallas_kernels.device import GENERATIONS, Device, describe
from peagle_jax.config import ConfigError

_COLD_BYTES = 300e6  # arguments of a program: several times the L2 cache
# Calls of a program: enough that its launch does not count, few enough to compile soon.
_CALLS = (8, 32)
_MAX_BYTES = 24e9
_REPEATS = 5
_SECONDS = 0.03  # of a repeat
_SHORT = 100e-6
"""Seconds of a call below which the host may take longer than the GPU: a call takes 10 to 50 us on slow hosts."""
_TRACED_CALLS = 2000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One spec of one operation: `function` takes arguments of `shapes` and moves `bytes`.

    `config` is the tuning config, if configs are compared; an `alternative` is not the default config.
    """

    op: str
    spec: str
    config: str | None = None
    alternative: bool = False
    function: Callable
    shapes: tuple
    inputs: Callable[[jax.Array], tuple]
    bytes: float


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


def cases(
    op: str, names: Sequence[str] | None = None, configs_for: Device | None = None
) -> Iterator[Case]:
    """Specs of an operation, all or those named; for a device each in all configs that it has there."""
    specs = deviceless.specs_of(op)
    for name, spec in specs.SPECS.items():
        if names is not None and name not in names:
            continue
        function, shapes = specs.build(spec)
        if hasattr(specs, "inputs"):
            inputs = lambda key, spec=spec: specs.inputs(spec, key)
        else:
            inputs = lambda key, shapes=shapes: _random(shapes, key)
        with dispatch.references():
            results = jax.eval_shape(function, *shapes)
        moved = specs.bytes(spec) if hasattr(specs, "bytes") else _bytes((shapes, results))
        asked = configs_for is not None and hasattr(specs, "configs")
        configs = specs.configs(spec, configs_for) if asked else []
        for i, config in enumerate(configs or [None]):
            yield Case(
                op=op,
                spec=name,
                config=None if config is None else _config_text(config),
                alternative=i > 0,
                function=function if config is None else specs.build(spec, config)[0],
                shapes=shapes,
                inputs=inputs,
                bytes=moved,
            )


def kernels(options: Options, environment: dict) -> Iterator[dict]:
    """Measures what `peagle-bench kernels` was asked for, a row at a time; rows go to `options.out`.

    Raises:
      ConfigError: there is no GPU, or no such operation or spec.
    """
    device = describe(jax.devices()[0])
    if device.sm not in GENERATIONS:
        raise ConfigError(
            f"kernels are timed on an NVIDIA GPU, Hopper or Blackwell; here is {rows.device_name()}"
        )
    ops = options.op or [op for op in deviceless.ops() if op != "ladder"]  # see bench.ladder
    known = {name for op in ops for name in deviceless.specs_of(op).SPECS}
    if unknown := sorted(set(options.spec or ()) - known):
        raise ConfigError(f"no operation has a spec {unknown[0]!r}; there are {sorted(known)}")
    for op in ops:
        asked = [name for name in deviceless.specs_of(op).SPECS if name in (options.spec or known)]
        has_kernel = deviceless.specs_on(op, device)
        if without := [name for name in asked if name not in has_kernel]:
            _log.warning("%s has no kernel for %s: %s skipped", op, device.name, ", ".join(without))
        names = [name for name in asked if name in has_kernel]
        for case in cases(op, names, device if options.configs else None):
            try:
                measured = measure(case, device.name)
            except Exception as error:  # the other cases are still measured
                said = str(error).splitlines() or [""]
                _log.error("%s %s: %s: %s", op, case.spec, type(error).__name__, said[0])
                continue
            row = rows.rounded({"kind": "kernel", **environment, **measured})
            rows.append(options.out, row)
            yield row


def measure(case: Case, chip: str) -> dict:
    """A row: times of kernel and reference, and the largest difference of their results.

    If the reference cannot run (usually out of memory), its columns are empty. It is not timed again for
    alternatives.
    """
    size = _bytes(case.shapes)
    calls = min(_CALLS[1], max(_CALLS[0], math.ceil(_COLD_BYTES / size)))
    calls = max(1, min(calls, int(_MAX_BYTES / size)))
    make = jax.jit(case.inputs)
    copies = [make(jax.random.key(i)) for i in range(calls)]
    kernel = timed(_retraced(case.function), copies, trace_below=_SHORT)
    row = {
        "op": case.op,
        "spec": case.spec,
        "config": case.config,
        "us": 1e6 * kernel.seconds,
        "bytes": case.bytes,
        "bytes_per_second": case.bytes / kernel.seconds,
        "fraction_of_bandwidth": None,
        "calls": kernel.calls,
        "linked_by": kernel.linked_by,
        "timed_by": kernel.timed_by,
        "reference_us": None,
        "speedup": None,
        "max_relative_error": None,
    }
    if chip in CHIPS:
        row["fraction_of_bandwidth"] = row["bytes_per_second"] / CHIPS[chip].bandwidth
    try:
        with dispatch.references():
            wanted = jax.jit(_retraced(case.function))(*copies[0])
            below = math.inf if kernel.timed_by == "trace" else 0.0
            function = _retraced(case.function)
            reference = None if case.alternative else timed(function, copies, trace_below=below)
    except jax.errors.JaxRuntimeError as error:
        _log.warning("%s %s: reference: %s", case.op, case.spec, str(error).splitlines()[0])
        return row
    found = jax.jit(_retraced(case.function))(*copies[0])
    row["max_relative_error"] = float(_max_relative_error(found, wanted))
    if reference is not None:
        row["reference_us"] = 1e6 * reference.seconds
        row["speedup"] = reference.seconds / kernel.seconds
    return row


def timed(function: Callable, copies: Sequence[tuple], *, trace_below: float = 0.0) -> Timing:
    """Times calls of `function`, one for each of the `copies` of its arguments, in one program.

    Calls of fewer seconds than `trace_below` are timed by a trace, if it shows a GPU.
    """
    links = _links(copies[0], jax.eval_shape(function, *copies[0]))
    leaves = jax.tree.leaves(copies[0])

    def program(carried, copies):
        kept = []
        for args in copies:
            # The barrier prevents fusion with neighbouring calls.
            made = jax.lax.optimization_barrier(function(*_carry(carried, args, links)))
            results = jax.tree.leaves(made)
            linked = [results[j].reshape(leaves[i].shape) for i, j in links.items()]
            carried = linked or jnp.ravel(results[0])[:1]
            # Return all outputs, or XLA would remove their computation.
            kept += [x for j, x in enumerate(results) if j not in links.values()]
        return carried, kept

    carried = [jnp.copy(leaves[i]) for i in links]
    if not links:
        carried = jnp.zeros(1, jax.tree.leaves(jax.eval_shape(function, *copies[0]))[0].dtype)
    run = jax.jit(program, donate_argnums=0).lower(carried, copies).compile()

    def seconds(turns: int) -> float:
        nonlocal carried
        start = time.perf_counter()
        for _ in range(turns):
            carried, kept = run(carried, copies)
        jax.block_until_ready((carried, kept))
        return time.perf_counter() - start

    seconds(1)
    turns = max(1, round(_SECONDS / seconds(1)))
    best = min(seconds(turns) for _ in range(_REPEATS)) / turns / len(copies)
    traced = _traced(seconds, len(copies)) if best < trace_below else None
    return Timing(
        seconds=best if traced is None else traced,
        calls=len(copies),
        linked_by="result" if links else "sum",
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


def _config_text(config: Any) -> str:
    """A config's fields, as `tokens=64 groups=(2, 2)`."""
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _retraced(function: Callable) -> Callable:
    """A new wrapper of `function`, so that `jax.jit` does not reuse an earlier trace."""
    return lambda *args: function(*args)


def _random(shapes: tuple, key: jax.Array) -> tuple:
    """Normal where numbers are real, zero where they are indices."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    one = lambda leaf, key: (
        jax.random.normal(key, leaf.shape).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, leaf.dtype)
    )
    return tree.unflatten([one(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def _bytes(tree: Any) -> float:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@jax.jit
def _max_relative_error(found: Any, wanted: Any) -> jax.Array:
    """Largest difference over all results, relative to the largest magnitude."""
    wide = lambda tree: [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    far = lambda one, other: jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other))
    return jnp.max(jnp.stack(list(map(far, wide(found), wide(wanted)))))
