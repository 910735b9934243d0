"""Compiles the programs of all cells of `decode-step` or `throughput` side by side, onto disk (`--jobs`).

Tracing and lowering hold Python's lock, so threads do not help: each job is a process. It builds engines of shapes,
without weights or caches, and needs little memory of the device. The measuring process loads the programs later.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import TYPE_CHECKING

import jax
from tqdm import tqdm

from bench.cells import Variant, methods_of, variants
from bench.commands.decode_step import Options
from bench.presets import preset
from bench.progress import progress_bar
from peagle_jax import runs
from peagle_jax.config import ConfigError
from peagle_jax.engine.device_calls import CONTROLS, PREFILL, Key

if TYPE_CHECKING:
    from peagle_jax.engine.engine import Engine

_CHILD_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Cell = tuple
"""What identifies an engine beside the options; hashable."""

Make = Callable[..., "Engine"]
"""A function of a module: (options, *cell) -> an engine of shapes."""


def compile_cells(
    make: Make, options: Options, cells: Sequence[Cell], say: Callable[[str], None]
) -> None:
    """Compiles what the cells need and what is not on disk yet, in `options.jobs` processes.

    The measuring process compiles or reports what these processes could not compile.

    Args:
      make: makes the engine of a cell, in any process.
      cells: one for each engine; messages contain `str` of the items of a cell.
      say: prints a line.
    """
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with (
        _environment(_CHILD_ENVIRONMENT),
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
        progress_bar(unit="program") as bar,
    ):
        try:
            done = _compile(pool, (make, options), cells, say, bar)
        except BrokenProcessPool:
            say("a compiling process was killed; the missing programs compile one after another")
            return
    say(
        f"{done} programs compiled by {options.jobs} processes in {time.perf_counter() - start:.0f} s"
    )


def _compile(pool, given: tuple, cells, say, bar: tqdm) -> int:
    wanted = {pool.submit(files_of, *given, cell): cell for cell in cells}
    files, jobs = set(), []
    for future in as_completed(wanted):
        cell = wanted[future]
        for key, file in _result(future, " at ".join(map(str, cell)), say) or ():
            if file not in files:
                files.add(file)
                jobs.append(pool.submit(compile_one, *given, cell, key))
                bar.total = len(jobs)
                bar.refresh()
    done = 0
    for future in as_completed(jobs):
        done += bool(_result(future, "a program", say))
        bar.update()
    return done


def _result(future: Future, what: str, say: Callable[[str], None]):
    """The result; None, and a message, if the program could not be compiled."""
    try:
        return future.result()
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        say(f"not compiled beforehand: {what}: {' '.join(str(error).split())[:200]}")
        return None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# The functions below run in the processes of the pool.


@cache
def _engine(make: Make, options: Options, cell: Cell) -> "Engine":
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    return make(options, *cell)


def decode_step_engine(options: Options, variant: Variant, group: tuple[int, ...]) -> "Engine":
    """The engine of `decode-step` for a variant at some concurrencies, with shapes for weights."""
    return _models(options).engine(options, variant, group)


@cache
def _models(options: Options):
    from bench.decode_step import Models

    dtype = runs.choose_dtype(options.dtype)
    methods = methods_of(variants(options))
    rules = dict(dtype=dtype, num_devices=options.tensor_parallel)
    return Models.shapes(preset(options.preset, options.layers), methods, **rules)


def files_of(make: Make, options: Options, cell: Cell) -> list[tuple[Key, str]]:
    """Programs of an engine that are not on disk yet, with their files; none if programs are not kept."""
    engine = _engine(make, options, cell)
    keys = (PREFILL, *engine.programs.round_keys, CONTROLS)
    found = ((key, engine.programs.file_of(key, engine._state)) for key in keys)
    return [(key, str(file)) for key, file in found if file is not None and not file.exists()]


def compile_one(make: Make, options: Options, cell: Cell, key: Key) -> bool:
    """Compiles a program onto disk. Returns whether it is there."""
    engine = _engine(make, options, cell)
    engine.programs.store(key, engine._state)
    return engine.programs.file_of(key, engine._state).exists()
