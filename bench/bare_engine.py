"""The engine of a server without the service: the same requests, in a process of its own.

The process that loads the server must not use the device, whose memory the server holds.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from bench.random_server import RandomModel, random_engine
from peagle_jax.config import ConfigError
from peagle_jax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Requests of a load, as `load_clients.Call` has them.

    Args:
      warm_up: the same, fewer or shorter, before the time counts.
      concurrency: requests at once; None gives each to the engine at its start.
      starts: seconds after the beginning.
    """

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    warm_up: Sequence[SamplingParams]
    concurrency: int | None
    starts: Sequence[float] | None = None


def in_child(function: Callable, *arguments) -> Any:
    """The result of a function in a process of its own, which has ended when this returns or raises.

    Raises:
      ConfigError: the process ended without a result.
      Exception: what the function raised.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_send, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError as error:
        raise ConfigError("the process of the bare engine ended without a result") from error
    finally:
        process.kill()
        process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _send(pipe: Connection, function: Callable, arguments: tuple) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # the first process raises it
        pipe.send(error)


def measure(
    model: RandomModel, options: Sequence[str], num_pages: int, cells: Sequence[Cell]
) -> list[dict]:
    """Fields of `Measurement.as_row` for each cell, and the tokens of all texts as `outputs`.

    Args:
      options: of the server.
      num_pages: of the server. Its number is a shape of every program, and free memory differs from start to start.
    """
    from bench.timing import drive
    from peagle_jax.cli import runs
    from serving.sources import resolve

    settings, _ = resolve(options)
    if not settings.no_cache:
        runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    engine = random_engine(replace(model, tokenizer=None), settings, num_pages)
    runs.warm_up(engine)
    found = []
    for cell in cells:
        at_once = cell.concurrency or len(cell.prompts)
        drive(engine, cell.prompts, cell.warm_up, concurrency=at_once)
        rules = dict(concurrency=at_once, starts=cell.starts)
        driven = drive(engine, cell.prompts, cell.params, **rules)
        found.append(driven.as_row() | {"outputs": driven.outputs})
    return found
