"""Cells of a measurement: a method, its drafts and the sizes of its engine."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from peagle_jax.config import EngineConfig

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
