"""Compiles the programs of all cells of `peagle-bench decode-step` side by side, onto disk (`--jobs`).

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

_OF_CHILDREN = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Group = tuple[int, ...]
"""Concurrencies of one engine."""


def compile_cells(
    options: Options, cells: Sequence[tuple[Variant, Group]], say: Callable[[str], None]
) -> None:
    """Compiles what the cells need and what is not on disk yet, in `options.jobs` processes.

    What a process cannot compile, the measuring process compiles or reports.

    Args:
      cells: variants with the concurrencies of one engine each.
      say: prints a line.
    """
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with (
        _environment(_OF_CHILDREN),
        ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool,
        progress_bar(unit="program") as bar,
    ):
        try:
            done = _compile(pool, options, cells, say, bar)
        except BrokenProcessPool:
            say("a process that compiled was killed; what is missing compiles one after another")
            return
    say(
        f"{done} programs compiled by {options.jobs} processes in {time.perf_counter() - start:.0f} s"
    )


def _compile(pool, options: Options, cells, say, bar: tqdm) -> int:
    wanted = {pool.submit(files_of, options, *cell): cell for cell in cells}
    files, jobs = set(), []
    for future in as_completed(wanted):
        variant, group = wanted[future]
        for key, file in _result(future, f"{variant.name} at {group}", say) or ():
            if file not in files:
                files.add(file)
                jobs.append(pool.submit(compile_one, options, variant, group, key))
                bar.total = len(jobs)
                bar.refresh()
    done = 0
    for future in as_completed(jobs):
        done += bool(_result(future, "a program", say))
        bar.update()
    return done


def _result(future: Future, what: str, say: Callable[[str], None]):
    """The result; None if there is none, which is said."""
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


# What follows runs in the processes of the pool.


@cache
def _engine(options: Options, variant: Variant, group: Group) -> "Engine":
    """An engine of shapes."""
    return _models(options).engine(options, variant, group)


@cache
def _models(options: Options):
    from bench.decode_step import Models

    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    dtype = runs.choose_dtype(options.dtype)
    methods = methods_of(variants(options))
    rules = dict(dtype=dtype, num_devices=options.tensor_parallel)
    return Models.shapes(preset(options.preset, options.layers), methods, **rules)


def files_of(options: Options, variant: Variant, group: Group) -> list[tuple[Key, str]]:
    """Programs of an engine that are not on disk yet, with their files; none if programs are not kept."""
    engine = _engine(options, variant, group)
    keys = (PREFILL, *engine.programs.round_keys, CONTROLS)
    found = ((key, engine.programs.file_of(key, engine._state)) for key in keys)
    return [(key, str(file)) for key, file in found if file is not None and not file.exists()]


def compile_one(options: Options, variant: Variant, group: Group, key: Key) -> bool:
    """Compiles a program onto disk. Returns whether it is there."""
    engine = _engine(options, variant, group)
    engine.programs.store(key, engine._state)
    return engine.programs.file_of(key, engine._state).exists()
