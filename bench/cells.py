"""Cells of a measurement: their engines, and programs that compile side by side (`--jobs`).

Child processes make engines of shapes, without weights or caches; this process makes none, which
would take memory of the device. The measuring process loads the programs later.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqdm import tqdm

from peagle_jax.cli import runs
from peagle_jax.config import EngineConfig
from peagle_jax.engine.device.compilation import Progress, compile_missing, named
from peagle_jax.engine.device.program import Program
from peagle_jax.engine.engine import Engine

_LOG_SECONDS = 5.0
"""Seconds between two states of a bar in a log."""


class Variant(NamedTuple):
    """One method with its settings; measured at each concurrency."""

    method: str
    num_draft: int  # most drafts per round
    adaptive: str = "off"  # what the engine chooses, as in `EngineConfig`

    def __str__(self) -> str:
        chosen = "" if self.adaptive == "off" else f" by {self.adaptive}"
        return f"{self.method} K={self.num_draft}{chosen}"


PLAIN = Variant("none", 0)


def cells_config(concurrencies: Sequence[int], **sizes: Any) -> EngineConfig:
    """Engine sizes with one batch bucket per measured concurrency; prompts are computed anew."""
    return EngineConfig(
        batch_sizes=tuple(sorted(concurrencies)), **{"prefix_caching": False} | sizes
    )


def progress_bar(**options) -> tqdm:
    """A bar of tqdm with its `options`. In a log it is written less often than in a terminal."""
    seconds = 0.1 if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(mininterval=seconds, miniters=1, **options)


@dataclass(frozen=True)
class Work:
    """An engine whose programs are to compile; a `compilation.Maker`.

    Args:
      make: a function at the top level of a module, so that it can be pickled: (options, *cell) ->
        an engine of shapes.
      options: those of its command.
      cell: arguments of `make` behind the options. Messages contain `str` of each.
      only_greedy: whether all requests are greedy.
    """

    make: Callable[..., Engine]
    options: Any
    cell: tuple
    only_greedy: bool = False

    def __call__(self) -> tuple[Any, Any, Sequence[Program]]:
        engine = self.make(self.options, *self.cell)
        programs = engine.programs
        rounds = programs.rounds_of_greedy if self.only_greedy else programs.rounds_of_any
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
    """Compiles the missing programs of some engines onto disk, in `jobs` processes, in the order of
    `work`.

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
        say(f"not compiled beforehand: {engine}: {named(key)}: {failure.reason}")
    if left := last.total - last.done:
        say(f"{left} programs are left, which compile one after another")
    done = last.done - sum(key is not None for _, key in failed)
    say(f"{done} programs compiled by {jobs} processes in {time.monotonic() - start:.0f} s")
