"""Compiles the programs of all cells of a command, or of several, side by side, onto disk (`--jobs`).

Child processes make engines of shapes, without weights or caches (`peagle_jax.engine.device.compilation`); this process makes
none, which would take memory of the device. The measuring process loads the programs later.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.cells import Variant, methods_of, variants
from bench.commands.decode_step import Options
from bench.presets import preset
from bench.progress import progress_bar
from bench.random_models import Models
from peagle_jax.cli import runs
from peagle_jax.engine.device.compilation import Progress, compile_missing
from peagle_jax.engine.device.device_calls import Key, spelled
from peagle_jax.engine.engine import Engine


@dataclass(frozen=True)
class Work:
    """An engine whose programs are to compile; a `compilation.Maker`.

    Args:
      make: a function at the top level of a module, so that it can be pickled: (options, *cell) -> an engine of shapes.
      options: those of its command.
      cell: arguments of `make` behind the options. Messages contain `str` of each.
    """

    make: Callable[..., Engine]
    options: Any
    cell: tuple

    def __call__(self) -> tuple[Any, Any, Sequence[Key]]:
        engine = self.make(self.options, *self.cell)
        programs = engine.programs
        is_greedy = getattr(engine.config, "only_greedy", False)
        rounds = programs.greedy_keys if is_greedy else programs.round_keys
        keys = (*programs.full_prefills, *programs.small_prefills, *rounds, *programs.copies)
        return programs, engine._state, keys


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
      seconds: after which the rest is left; None: no limit.
      on_ready: called with the index of an engine once all its programs are on disk, or cannot be.
    """
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    start, last = time.monotonic(), Progress(0, 0, 0.0)
    with progress_bar(unit="program") as bar:

        def report(progress: Progress) -> None:
            nonlocal last
            last, bar.total = progress, progress.total
            bar.update(progress.done - bar.n)

        failed = compile_missing(
            work,
            [None] * len(work),
            jobs=jobs,
            must_end=lambda: seconds is not None and time.monotonic() - start > seconds,
            report=report,
            on_ready=on_ready,
        )
    for (index, key), failure in failed.items():
        engine = " at ".join(map(str, work[index].cell))
        say(f"not compiled beforehand: {engine}: {spelled(key)}: {failure.reason}")
    if left := last.total - last.done:
        say(f"{left} programs are left, which compile one after another")
    done = last.done - sum(key is not None for _, key in failed)
    say(f"{done} programs compiled by {jobs} processes in {time.monotonic() - start:.0f} s")


def decode_step_engine(options: Options, variant: Variant, group: tuple[int, ...]) -> Engine:
    """The engine of `decode-step` for a variant at some concurrencies, with shapes for weights."""
    return _models(options).engine(options, variant, group)


@cache
def _models(options: Options) -> Models:
    dtype = runs.choose_dtype(options.dtype)
    methods = methods_of(variants(options))
    rules = dict(dtype=dtype, num_devices=options.tensor_parallel)
    chosen = preset(options.preset, options.layers, options.selector)
    return Models.shapes(chosen, methods, **rules)
