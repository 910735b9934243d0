"""`peagle-bench decode-step --replicas R`: rounds of engines that run at the same time, each on devices of its own.

Each engine is a process and has an equal share of the requests. All wait for each other before each run that is
timed, so that each is timed while the others run.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait

from bench import rows
from bench.commands.decode_step import Options
from bench.compile_cells import compile_all
from bench.decode_step import measured, of_replica, work
from bench.kernel_jobs import environment
from peagle_jax.config import ConfigError

_MEET_SECONDS = 120.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KEY = ("method", "num_speculative_tokens", "adaptive", "concurrency")
_SUMS = (
    "prompts", "prompt_tokens", "tokens", "tokens_per_second", "full_tokens_per_second",
    "decode_tokens_per_second", "prefill_tokens_per_second",
)  # fmt: skip
"""Fields that are those of all replicas together. The others are those of the first."""


def side_by_side(options: Options) -> list[dict]:
    """Measures every cell, appends its row to `options.out` as soon as all replicas have it, and returns the rows.

    This process does not use the devices.

    Raises:
      ConfigError: a replica failed.
    """
    count = options.replicas
    own = replace(of_replica(options), jobs=1)
    if options.jobs > 1:
        compile_all(work(options), options.jobs, partial(print, file=sys.stderr))
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(count, timeout=_MEET_SECONDS)
    with contextlib.ExitStack() as stack:
        ends, processes = [], []
        for number in range(count):
            end, other = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_replica, args=(own, barrier, other), daemon=True)
            with environment({_VISIBLE: _devices_of(number, options.tensor_parallel)}):
                process.start()
            other.close()  # so that the end of the process is the end of the pipe
            ends.append(stack.enter_context(end))
            processes.append(process)
            stack.callback(process.kill)
        done = []
        for some in _cells(ends, processes):
            done.append(rows.rounded(_together(some, rows.command())))
            rows.append(options.out, done[-1])
    return done


def _devices_of(number: int, size: int) -> str:
    """Names of the GPUs of a replica; ignored where there are none."""
    given = os.environ.get(_VISIBLE)
    names = given.split(",") if given else [str(i) for i in range((number + 1) * size)]
    own = names[number * size : (number + 1) * size]
    if len(own) < size:
        raise ConfigError(f"--replicas: {_VISIBLE}={given} names too few devices")
    return ",".join(own)


def _replica(options: Options, barrier, end: Connection) -> None:
    """Sends a row of each cell; the main function of a replica's process."""
    for row in measured(options, options.environment(), meet=barrier.wait):
        end.send(row)
    end.close()


def _cells(ends: Sequence[Connection], processes: Sequence) -> Iterator[list[dict]]:
    """Rows of all replicas for one cell after the other, each when the last replica has measured it."""
    found: list[dict[tuple, dict]] = [{} for _ in ends]
    left = list(ends)
    while left:
        for end in wait(left):
            number = ends.index(end)
            try:
                row = end.recv()
            except EOFError:
                left.remove(end)
                processes[number].join()
                if code := processes[number].exitcode:
                    raise ConfigError(f"replica {number} ended with exit code {code}") from None
                continue
            cell = tuple(row.get(name) for name in _KEY)
            found[number][cell] = row
            if all(cell in one for one in found):
                yield [one.pop(cell) for one in found]


def _together(some: Sequence[dict], command: str) -> dict:
    """One row for the rows of all replicas. Its round is the time in which all sequences advance by one round."""
    rate = sum(1 / row["ms_per_round"] for row in some)
    mean = sum(1 / row["ms_per_round_mean"] for row in some)
    sums = {name: sum(row[name] for row in some) for name in _SUMS if some[0].get(name) is not None}
    return some[0] | {
        **sums,
        "concurrency": sum(row["concurrency"] for row in some),
        "replicas": len(some),
        "ms_per_round": len(some) / rate,
        "ms_per_round_mean": len(some) / mean,
        "ms_per_round_of_replicas": [row["ms_per_round"] for row in some],
        "command": command,
    }
