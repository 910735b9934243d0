"""Rules of the options that choose the number of drafts at run time: K by batch size, by load, by n-grams.

K by batch size has vLLM's form: `[[low, high, K], ...]`, batch sizes with both ends included.

Sizes between two ranges, and above the last, have the K of the range before them. Sizes below the first
range have the most drafts per round (`num_speculative_tokens`), and no K exceeds it.
"""

import json
from collections.abc import Sequence
from typing import Literal, get_args

from peagle_jax.errors import ConfigError
from peagle_jax.removed import check_choice

OPTION = "num_speculative_tokens_per_batch_size"
"""Public name: of the options of commands and servers, and in messages."""

Schedule = tuple[tuple[int, int, int], ...]
"""(low, high, K) in ascending order; empty: the most drafts for all sizes."""

Adaptive = Literal["off", "load"]
"""Choice at run time: none, or K by load (`engine.host.k_by_load`)."""

ADAPTIVE: tuple[Adaptive, ...] = get_args(Adaptive)


def schedule_of(ranges: Sequence[Sequence[int]]) -> Schedule:
    """The ranges as a `Schedule`.

    Raises:
      ConfigError: they are not a list of [low, high, K] in ascending order without overlap.
    """
    if isinstance(ranges, str) or not isinstance(ranges, Sequence):
        raise _error(f"{ranges!r} must be a list of [low, high, K]")
    above = 0
    for item in ranges:
        is_triple = isinstance(item, Sequence) and len(item) == 3
        if not is_triple or not all(type(number) is int for number in item):
            raise _error(f"{item!r} must be three whole numbers, [low, high, K]")
        low, high, num_draft = item
        if num_draft < 0:
            raise _error(f"{list(item)}: K must not be negative")
        if not above < low <= high:
            raise _error(
                f"{list(item)}: batch sizes must begin at 1 or more, and above the range before"
            )
        above = high
    return tuple(tuple(item) for item in ranges)


def parse(text: str) -> Schedule:
    """The schedule of an option's text, as "[[1, 8, 7], [9, 64, 3]]".

    Raises:
      ConfigError: it is not JSON, or not a schedule, or an empty one.
    """
    try:
        ranges = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(f"{text!r} is not JSON: {error}") from error
    schedule = schedule_of(ranges)
    if not schedule:
        raise _error("there must be at least one range")
    return schedule


def num_draft_at(schedule: Schedule, batch_size: int, most: int) -> int:
    """K of rounds with `batch_size` rows; `most` is `num_speculative_tokens`.

    Example: [[1, 8, 7], [16, 64, 0]] gives 7 up to 15 rows and 0 from 16 on.
    """
    num_draft = most
    for low, _, scheduled in schedule:
        if low <= batch_size:
            num_draft = min(scheduled, most)
    return num_draft


NGRAM_DRAFTS = 15
"""Tokens that an n-gram match proposes."""
NGRAM_LONGEST = 16
"""Most tokens of a match that are compared."""


def check_ngram(least: int, num_draft: int, adaptive: str, schedule: Schedule) -> None:
    """Raises `ConfigError` for a match length that is out of range, and for options that n-grams exclude.

    Args:
      least: tokens of a match, 0 for no n-gram drafts.
      num_draft: most drafts of the head.
    """
    if not 0 <= least <= NGRAM_LONGEST:
        raise ConfigError.of("ngram", f"{least} must lie between 0 (off) and {NGRAM_LONGEST}")
    if least and (adaptive != "off" or schedule):
        rule = "n-grams choose between two numbers of drafts: set adaptive to off, and no drafts by batch size"
        raise ConfigError.of("ngram", rule)
    if least and num_draft >= NGRAM_DRAFTS:
        rule = f"{num_draft} must be below {NGRAM_DRAFTS}, the drafts of an n-gram"
        raise ConfigError.of("num_speculative_tokens", rule)


def adaptive_of(text: str) -> Adaptive:
    """The text as a choice; raises `ConfigError` if it is none."""
    check_choice("adaptive", text, ADAPTIVE)
    return text


def check_adaptive(adaptive: str, schedule: Schedule) -> None:
    """Raises `ConfigError` for an unknown value, and for a choice at run time beside a schedule."""
    adaptive_of(adaptive)
    if adaptive != "off" and schedule:
        raise ConfigError.of(
            "adaptive",
            f"{adaptive!r} chooses the number of drafts at run time, and {OPTION} fixes it: "
            "leave one of the two out",
        )


def adaptive_or_default(adaptive: Adaptive | None, schedule: Schedule, ngram: int = 0) -> Adaptive:
    """A command's `--adaptive`; without it "load", or "off" where a schedule or n-grams choose K."""
    if adaptive is not None:
        return adaptive
    return "off" if schedule or ngram else "load"


def _error(what: str) -> ConfigError:
    return ConfigError.of(OPTION, f"{what}; an example is [[1, 8, 7], [9, 64, 3]]")


def check_most(schedule: Schedule, most: int) -> None:
    """Raises `ConfigError` for a K above `num_speculative_tokens`, which no round could have."""
    for item in schedule:
        if item[2] > most:
            raise _error(f"{list(item)}: K must be at most num_speculative_tokens={most}")


def check_drafts(config) -> None:
    """Raises `ConfigError` for fields of an `EngineConfig` that exclude each other."""
    check_adaptive(config.adaptive, config.draft_schedule)
    check_ngram(config.ngram, config.num_draft, config.adaptive, config.draft_schedule)
