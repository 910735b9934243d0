"""`python -m lab ladder`: the steps of lab/ladder.md, each beside its reference and its
prediction.

A step runs in a process of its own with a time limit for each of its rows. A kernel that crashes,
hangs or breaks the device's context so costs the rest of its own step only; a row then says what
happened.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import jax

from bench import rows
from bench.command import Command, RowOptions
from bench.printed import show_table
from lab import kernels
from lab.ladder_model import predict
from lab.lesson import specs
from pallas_kernels.device import describe
from peagle_jax.config import ConfigError

SECONDS = 240.0
"""Limit of one row: compiling two programs of some 30 calls, and running them."""

TOLERANCE = 2**-6
"""Largest difference from the reference, relative to the largest result, both rounded to
bfloat16."""

_MEASURED = ("us", "bytes_per_second", "fraction_of_bandwidth", "timed_by", "max_relative_error")
Worker = Callable[[Sequence[str], Connection], None]


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    out: Path = Path("ladder.jsonl")


def run(options: Options) -> int:
    """Measures all steps, a row each, and prints them; 1 if a step fails or is wrong."""
    header = ["step, weight, rows", "floor, us", "predicted, us", "TB/s", "measured, us", "TB/s"]
    done = list(ladder(options))
    show_table([*header, "of the bandwidth"], list(map(cells, done)), options.out)
    return 1 if any(row["error"] for row in done) else 0


def cells(row: dict) -> list[str]:
    """A row as it is printed."""
    if row["us"] is None:
        ends = [row["error"], "", ""]
    else:
        wrong = f" ({row['error']})" if row["error"] else ""
        ends = [f"{row['us']:.1f}{wrong}", f"{row['bytes_per_second'] / 1e12:.2f}"]
        share = row["fraction_of_bandwidth"]
        ends.append("" if share is None else f"{share:.0%}")
    return [
        row["spec"],
        f"{row['floor_us']:.1f}",
        f"{row['predicted_us']:.1f} ({row['predicted_limit']})",
        f"{row['bytes'] / row['predicted_us'] / 1e6:.2f}",
        *ends,
    ]


def ladder(options: Options) -> Iterator[dict]:
    """Measures all steps, a row at a time; rows go to `options.out`, those of failures too.

    Raises:
      ConfigError: there is no Hopper GPU.
    """
    # This process reads the device's name only; the memory is for the processes that measure.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if describe(jax.devices()[0]).sm not in specs.CHIPS:
        raise ConfigError(f"the ladder is for Hopper GPUs; here is {rows.device_name()}")
    environment = rows.environment(options.commit)
    for step in specs.STEPS:
        for measured in run_step(step):
            row = rows.rounded({"kind": "ladder", **environment, **measured})
            rows.append(options.out, row)
            yield row


def run_step(
    step: specs.Step, worker: Worker | None = None, seconds: float = SECONDS
) -> Iterator[dict]:
    """A row for each spec of a step, measured by `worker` in a process of its own.

    Args:
      worker: called with names of specs and a connection; sends `measured` or `failed` of each, in
        order.
      seconds: limit of each row.
    """
    names = [name for name, spec in specs.SPECS.items() if spec.step == step]
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the parent's jax
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=worker or measure_specs, args=(names, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the process ends the pipe
    try:
        for i in range(len(names)):
            try:
                if not receiver.poll(seconds):
                    yield from (failed(left, f"no result in {seconds:g} s") for left in names[i:])
                    return
                yield receiver.recv()
            except EOFError:
                process.join(seconds)
                how = f"its process ended with exit code {process.exitcode}"
                yield from (failed(left, how) for left in names[i:])
                return
    finally:
        process.kill()
        process.join()
        receiver.close()


def measure_specs(names: Sequence[str], sender: Connection) -> None:
    """The worker: measures specs of the ladder on this process's GPU."""
    for name in names:
        try:
            (case,) = kernels.cases("lab.lesson", [name])
            row = measured(name, kernels.measure(case, jax.devices()[0].device_kind))
        except Exception as error:  # the other steps are still measured
            said = str(error).splitlines() or [""]
            row = failed(name, f"{type(error).__name__}: {said[0]}")
        sender.send(row)


def measured(name: str, row: dict) -> dict:
    """The ladder's row of a spec, from the row of `lab.kernels.measure`."""
    far = row["max_relative_error"]
    if far is None:
        error = "not compared: the reference did not run"
    elif not far <= TOLERANCE:  # NaN is no agreement
        error = f"wrong: differs from the reference by {far:.1e}"
    else:
        error = None
    return {**_described(name), **{key: row[key] for key in _MEASURED}, "error": error}


def failed(name: str, error: str) -> dict:
    """The row of a spec without a measurement."""
    return {**_described(name), **dict.fromkeys(_MEASURED), "error": error}


def _described(name: str) -> dict:
    spec = specs.SPECS[name]
    prediction = predict(spec)
    return {
        "step": spec.step,
        "spec": name,
        "weight": spec.weight,
        "rows": spec.rows,
        "bytes": spec.bytes,
        "floor_us": 1e6 * prediction.floor,
        "predicted_us": 1e6 * prediction.seconds,
        "predicted_limit": prediction.limit,
    }


COMMAND = Command(
    examples=("ladder",),
    description="""
Times the steps of the ladder, each beside its reference and its prediction. Needs a Hopper GPU.
Exit code 1 if a step fails or is wrong.
""",
    options=Options,
    run=run,
)
