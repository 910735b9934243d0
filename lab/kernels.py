"""`python -m lab kernels`: times each kernel against its XLA reference, on the shapes of real
models.

Each call has its own arguments, so that weights come from device memory and not from the L2 cache.
Where calls are so short that the host may take longer than the GPU, their time is that of their
kernels in a trace. The cases are the specs of an operation: its module in `lab/specs` has `SPECS`,
name -> spec, and `build(spec)`, a function to jit that requires the kernel, and its argument
shapes. It may also have:

- `inputs(spec, key)`: arguments, if random values and zeros are invalid for the operation.
- `bytes(spec)`: bytes moved, if not every argument and result once.
- `compared(spec, results)`: the results that are compared, if not all: without what is undefined.
- `REFERENCE_OPTIONS`: options of XLA for the reference.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import rows
from bench.command import RESULTS, Command, RowOptions, repeatable
from bench.printed import show
from lab.kernel_jobs import Job, log_failure, side_by_side
from lab.kernel_timing import SHORT, Program
from lab.roofline import CHIPS
from lab.specs import ops, specs_of, specs_on
from pallas_kernels import dispatch
from pallas_kernels.device import GENERATIONS, Device, describe
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError
from peagle_jax.engine.device.compilation import CHILD_ENVIRONMENT

_COLD_BYTES = 300e6  # arguments of all calls: several times the L2 cache
_CALLS = (8, 32)  # least and most calls with arguments of their own
_MAX_BYTES = 24e9
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    """Options of this command.

    Args:
      op: operation, a folder of pallas_kernels; repeatable, all without it
      spec: spec, a named shape in the operation's module of lab/specs; repeatable, all without it
      jobs: processes that compile side by side; each takes 2 to 4 GB of memory of the host. One
        spec is measured at a time
    """

    op: tuple[str, ...] = repeatable()
    spec: tuple[str, ...] = repeatable()
    jobs: int = 1
    out: Path = RESULTS / "kernels.jsonl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One spec of one operation: `function` takes arguments of `shapes` and moves `bytes`."""

    op: str
    spec: str
    function: Callable
    shapes: tuple
    inputs: Callable[[jax.Array], tuple]
    compared: Callable[[Any], Any]
    bytes: float


def cases(op: str, names: Sequence[str] | None = None) -> Iterator[Case]:
    """Specs of an operation, all or those named."""
    specs = specs_of(op)
    for name, spec in specs.SPECS.items():
        if names is not None and name not in names:
            continue
        function, shapes = specs.build(spec)
        if hasattr(specs, "inputs"):
            inputs = lambda key, spec=spec: specs.inputs(spec, key)
        else:
            inputs = lambda key, shapes=shapes: _random(shapes, key)
        compared = lambda results: results
        if hasattr(specs, "compared"):
            compared = lambda results, spec=spec: specs.compared(spec, results)
        with dispatch.references():
            results = jax.eval_shape(function, *shapes)
        moved = specs.bytes(spec) if hasattr(specs, "bytes") else _bytes((shapes, results))
        yield Case(
            op=op,
            spec=name,
            function=function,
            shapes=shapes,
            inputs=inputs,
            compared=compared,
            bytes=moved,
        )


def run(options: Options) -> int:
    """Measures kernels, a row each, and prints them."""
    if options.jobs > 1:  # this process needs no memory of the GPU
        os.environ.update(CHILD_ENVIRONMENT)
    show("kernels", list(_measured(options, options.environment())), options.out)
    return 0


def _measured(options: Options, environment: dict) -> Iterator[dict]:
    """The rows of what was asked for, one at a time; they go to `options.out`.

    Raises:
      ConfigError: there is no GPU, or no such operation or spec.
    """
    device = describe(jax.devices()[0])
    if device.sm not in GENERATIONS:
        raise ConfigError(
            f"kernels are timed on an NVIDIA GPU, Hopper or Blackwell; here is {rows.device_name()}"
        )
    every = ops()
    if unknown := sorted(set(options.op or ()) - {*every}):
        raise ConfigError(f"there is no operation {unknown[0]!r}; there are {every}")
    chosen = options.op or every
    known = {name for op in chosen for name in specs_of(op).SPECS}
    if unknown := sorted(set(options.spec or ()) - known):
        raise ConfigError(f"no operation has a spec {unknown[0]!r}; there are {sorted(known)}")
    jobs = [job for op in chosen for job in _jobs(options, op, device)]
    if options.jobs > 1:
        measured = side_by_side(jobs, options.jobs, compile_job, measure_job)
    else:
        measured = (row for job in jobs for row in rows_of(job, device, measure))
    for one in measured:
        row = rows.rounded({"kind": "kernel", **environment, **one})
        rows.append(options.out, row)
        yield row


def _jobs(options: Options, op: str, device: Device) -> list[Job]:
    """The specs of an operation that were asked for and have a kernel; others are logged."""
    asked = [name for name in specs_of(op).SPECS if not options.spec or name in options.spec]
    has_kernel = specs_on(op, device)
    if without := [name for name in asked if name not in has_kernel]:
        _log.warning("%s has no kernel for %s: %s skipped", op, device.name, ", ".join(without))
    return [Job(op, name) for name in asked if name in has_kernel]


def rows_of(job: Job, device: Device, measure: Callable[[Case, str], Any]) -> Iterator[Any]:
    """What `measure` makes of each case of a job; a case that fails is logged."""
    for case in cases(job.op, [job.spec]):
        try:
            made = measure(case, device.name)
        except Exception as error:
            log_failure(job.op, job.spec, error)
        else:
            yield made


def compile_job(job: Job, turn: contextlib.AbstractContextManager) -> bool:
    """Compiles the cases of a job onto disk; whether all references are compiled too."""
    compiled = list(_in_child(job, lambda case, chip: Prepared(case).reference is not None))
    return bool(compiled) and all(compiled)


def measure_job(job: Job, turn: contextlib.AbstractContextManager) -> list[dict]:
    """The rows of a job, without the fields that all rows share."""

    def measure(case: Case, chip: str) -> dict:
        prepared = Prepared(case, with_reference=job.reference)
        with turn:
            return prepared.measure(chip)

    return list(_in_child(job, measure))


def _in_child(job: Job, measure: Callable[[Case, str], Any]) -> Iterator[Any]:
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    yield from rows_of(job, describe(jax.devices()[0]), measure)


class Prepared:
    """A case whose kernel and reference are compiled.

    If the reference cannot be compiled (usually out of memory), it is None.
    """

    def __init__(self, case: Case, *, with_reference: bool = True):
        size = _bytes(case.shapes)
        calls = min(_CALLS[1], max(_CALLS[0], math.ceil(_COLD_BYTES / size)))
        self.case, self.calls = case, max(1, min(calls, int(_MAX_BYTES / size)))
        key = jax.eval_shape(lambda: jax.random.key(0))
        self._inputs = jax.jit(case.inputs).lower(key).compile()
        self._kernel = Program(_retraced(case.function), case.shapes)
        self.reference = None
        if with_reference:
            options = getattr(specs_of(case.op), "REFERENCE_OPTIONS", None)
            with dispatch.references(), self._tried():
                self.reference = Program(_retraced(case.function), case.shapes, options)

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """What the reference does: a warning if it cannot."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            op, spec = self.case.op, self.case.spec
            _log.warning("%s %s: reference: %s", op, spec, str(error).splitlines()[0])

    def measure(self, chip: str) -> dict:
        """A row: times of kernel and reference, and the largest difference of their results.

        If the reference cannot run, its columns are empty.
        """
        case = self.case
        copies = [self._inputs(jax.random.key(i)) for i in range(self.calls)]
        kernel = self._kernel.time(copies, trace_below=SHORT)
        row = {
            "op": case.op,
            "spec": case.spec,
            "us": 1e6 * kernel.seconds,
            "bytes": case.bytes,
            "bytes_per_second": case.bytes / kernel.seconds,
            "fraction_of_bandwidth": None,
            "calls": kernel.calls,
            "timed_by": kernel.timed_by,
            "reference_us": None,
            "speedup": None,
            "max_relative_error": None,
        }
        if chip in CHIPS:
            row["fraction_of_bandwidth"] = row["bytes_per_second"] / CHIPS[chip].bandwidth
        if self.reference is None:
            return row
        with self._tried():
            both = (case.compared(run(*copies[0])) for run in (self._kernel, self.reference))
            row["max_relative_error"] = float(_max_relative_error(*both))
            below = math.inf if kernel.timed_by == "trace" else 0.0
            reference = self.reference.time(copies, trace_below=below)
            row["reference_us"] = 1e6 * reference.seconds
            row["speedup"] = reference.seconds / kernel.seconds
        return row


def measure(case: Case, chip: str) -> dict:
    """Compiles a case and measures it."""
    return Prepared(case).measure(chip)


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


COMMAND = Command(
    examples=("kernels --op moe --spec qwen3-moe-gate-up-256", "kernels --jobs 15 --op quantize"),
    description="""
Times every operation of pallas_kernels on the shapes of real models (its specs), with arguments
that come from device memory and not from the L2 cache, and compares results with the jnp reference,
compiled by XLA. Needs a Hopper or Blackwell GPU.
""",
    options=Options,
    run=run,
    removed={
        "configs": "each kernel chooses its own; leave it out",
    },
)
