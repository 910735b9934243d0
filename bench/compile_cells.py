"""Compiles the programs of all cells of a command, or of several, side by side, onto disk (`--jobs`).

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
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bench.cells import Variant, methods_of, variants
from bench.commands.decode_step import Options
from bench.presets import preset
from bench.progress import progress_bar
from peagle_jax import runs
from peagle_jax.engine.device_calls import CONTROLS, PREFILL, Key

if TYPE_CHECKING:
    from peagle_jax.engine.engine import Engine

CHILD_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Cell = tuple
"""Arguments of `Make` behind the options, for one engine; hashable."""

Make = Callable[..., "Engine"]
"""A function at the top level of a module, so that it can be pickled: (options, *cell) -> an engine of shapes."""

Work = tuple[Make, Any, Cell]
"""An engine whose programs are to compile: its maker, the options of its command, and its cell. Messages contain `str`
of the items of the cell."""


def compile_all(
    work: Sequence[Work],
    jobs: int,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
    on_ready: Callable[[int], object] = lambda index: None,
) -> None:
    """Compiles what some engines need and what is not on disk yet, in `jobs` processes, in the order of `work`.

    The measuring process compiles or reports what these processes could not compile.

    Args:
      say: prints a line.
      seconds: after which no program begins to compile; None: no limit.
      on_ready: called with the index of an engine once all its programs are on disk, or cannot be.
    """
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with (
        environment(CHILD_ENVIRONMENT),
        ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
        progress_bar(unit="program") as bar,
    ):
        try:
            done = _compile(pool, work, say, bar, seconds, on_ready)
        except BrokenProcessPool:
            say("a compiling process was killed; the missing programs compile one after another")
            return
    say(f"{done} programs compiled by {jobs} processes in {time.perf_counter() - start:.0f} s")


def _compile(pool, work: Sequence[Work], say, bar: tqdm, seconds: float | None, on_ready) -> int:
    start = time.perf_counter()
    wanted = [(one, pool.submit(files_of, *one)) for one in work]
    jobs: dict[Future, str] = {}
    missing: list[set[str]] = []  # files of each engine
    for one, future in wanted:
        missing.append(set())
        for key, file in _result(future, " at ".join(map(str, one[-1])), say) or ():
            missing[-1].add(file)
            if file not in jobs.values():
                jobs[pool.submit(compile_one, *one, key)] = file
                bar.total = len(jobs)
                bar.refresh()
    for index, files in enumerate(missing):
        if not files:
            on_ready(index)
    done = 0
    limit = None if seconds is None else max(0.0, seconds + start - time.perf_counter())
    try:
        for future in as_completed(jobs, timeout=limit):
            done += bool(_result(future, "a program", say))
            bar.update()
            for index, files in enumerate(missing):
                if jobs[future] in files:
                    files.remove(jobs[future])
                    if not files:
                        on_ready(index)
    except TimeoutError:
        pool.shutdown(wait=False, cancel_futures=True)
        say(f"{len(jobs) - done} programs are left, which compile one after another")
    return done


def _result(future: Future, what: str, say: Callable[[str], None]):
    """The result; None, and a message, if the program could not be compiled."""
    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except Exception as error:  # the measuring process gets the same error and reports it; other programs must compile
        say(f"not compiled beforehand: {what}: {' '.join(str(error).split())[:200]}")
        return None


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables for processes that start within."""
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
def _engine(make: Make, options, cell: Cell) -> "Engine":
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    return make(options, *cell)


def decode_step_engine(options: Options, variant: Variant, group: tuple[int, ...]) -> "Engine":
    """The engine of `decode-step` for a variant at some concurrencies, with shapes for weights."""
    return _models(options).engine(options, variant, group)


@cache
def _models(options: Options):
    from bench.random_models import Models

    dtype = runs.choose_dtype(options.dtype)
    methods = methods_of(variants(options))
    rules = dict(dtype=dtype, num_devices=options.tensor_parallel)
    chosen = preset(options.preset, options.layers, options.selector)
    return Models.shapes(chosen, methods, **rules)


def files_of(make: Make, options, cell: Cell) -> list[tuple[Key, str]]:
    """Programs of an engine that are not on disk yet, with their files; none if programs are not kept."""
    engine = _engine(make, options, cell)
    programs = engine.programs
    is_greedy = getattr(engine.config, "only_greedy", False)
    rounds = programs.greedy_keys if is_greedy else programs.round_keys
    keys = (PREFILL, *rounds, *programs.small_prefills, CONTROLS)
    found = ((key, engine.programs.file_of(key, engine._state)) for key in keys)
    return [(key, str(file)) for key, file in found if file is not None and not file.exists()]


def compile_one(make: Make, options, cell: Cell, key: Key) -> bool:
    """Compiles a program onto disk. Returns whether it could be stored."""
    engine = _engine(make, options, cell)
    engine.programs.store(key, engine._state)
    return engine.programs.file_of(key, engine._state).exists()
