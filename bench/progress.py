"""Progress on stderr, also in logs."""

import sys

from tqdm import tqdm

from peagle_jax.cli import runs
from peagle_jax.engine.engine import Engine

_SECONDS = 5.0
"""Seconds between two states of a bar in a log."""


def progress_bar(**options) -> tqdm:
    """A bar of tqdm with its `options`. In a log it is written less often than in a terminal."""
    seconds = 0.1 if sys.stderr.isatty() else _SECONDS
    return tqdm(mininterval=seconds, miniters=1, **options)


def warm_up(engine: Engine, title: str) -> None:
    """`Engine.warm_up` with a bar of the programs; of those that greedy requests need, if the cells have no others."""
    total, only_greedy = engine.num_programs, getattr(engine.config, "only_greedy", False)
    if only_greedy:
        total -= len(engine.programs.round_keys) - len(engine.programs.greedy_keys)
    runs.compile_missing(engine, only_greedy=only_greedy)
    with progress_bar(desc=f"{title}: compiling", total=total, unit="program", leave=False) as bar:
        engine.warm_up(bar.update, only_greedy=only_greedy)
