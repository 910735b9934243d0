"""`peagle-bench choose-k`: the K of each batch size with the most tokens per second, from measured rows.

A round of K drafts for B sequences emits B * (1 + a_1 + .. + a_K) tokens in t(B, K), where a_j is the share
of rounds in which draft j becomes output. P-EAGLE drafts any K with the same weights, so acceptance
measured at the largest K holds for the smaller ones.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle_jax.cli import runs
from peagle_jax.config import ConfigError
from peagle_jax.engine.device.stored_times import read_times
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.round_times import monotone

Times = Mapping[tuple[int, int], float]
"""Milliseconds per round by (concurrency, K)."""


@dataclass(frozen=True)
class Choice:
    """Tokens per second by (concurrency, K), and the schedule that has the best K of each concurrency."""

    rates: dict[tuple[int, int], float]
    schedule: list[tuple[int, int, int]]


def times_of(rows: Sequence[dict], model: str, method: str) -> dict[tuple[int, int], float]:
    """Milliseconds per round of `method`, and of plain decoding as K = 0; of equal cells the newest row.

    Raises:
      ConfigError: no row has a time.
    """
    times = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        is_cell = row.get("model") == model and row.get("method") in ("none", method)
        if is_cell and row.get("kind") in ("decode-step", "throughput") and row["ms_per_round"]:
            times[row["concurrency"], row["num_speculative_tokens"]] = row["ms_per_round"]
    if not any(k for _, k in times):
        models = sorted(
            {row["model"] for row in rows if row.get("kind") in ("decode-step", "throughput")}
        )
        raise ConfigError(
            f"no times of {method} for {model!r}; there are rows of {', '.join(models)}"
        )
    return times


def stored_times(path: Path) -> dict[tuple[int, int], float]:
    """Milliseconds per round by (batch bucket, K) from a file that an engine keeps (docs/adaptive.md).

    Raises:
      ConfigError: it cannot be read, or has no time of a round with drafts.
    """
    try:
        times = read_times(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not any(shape.num_draft for shape in times):
        raise ConfigError(f"{path}: has no time of a round with drafts")
    return {(b, k): 1e3 * seconds for (b, k), seconds in times.items()}


def acceptance_of(rows: Sequence[dict], model: str, method: str) -> list[float]:
    """Acceptance by position from the row with the most drafts per round, of these with the most rounds.

    Rows with synthetic acceptance do not count.

    Raises:
      ConfigError: there is no such row.
    """
    real = [
        row
        for row in rows
        if row.get("model") == model
        and row.get("method") == method
        and row.get("kind") in ("acceptance", "throughput")
    ]
    if not real:
        raise ConfigError(f"no rows with {method}'s acceptance for {model!r}; give --acceptance")
    best = max(real, key=lambda row: (row["num_speculative_tokens"], row["rounds"]))
    return best["acceptance_per_position"]


def choose(times: Times, acceptance: Sequence[float], *, least_gain: float) -> Choice:
    """The best K of each concurrency.

    Times are made monotone first: a round with more sequences or more drafts takes no less. Of two K whose
    rates differ by less than the share `least_gain`, the smaller is chosen.
    """
    known = {RoundShape(*cell): ms for cell, ms in times.items() if cell[1] <= len(acceptance)}
    rates = {
        (b, k): 1e3 * b * (1 + sum(acceptance[:k])) / ms
        for (b, k), ms in sorted(monotone(known).items())
    }
    schedule, low = [], 1
    for b, cells in itertools.groupby(rates, key=lambda cell: cell[0]):
        best = None
        for cell in cells:
            if best is None or rates[cell] > (1 + least_gain) * rates[best]:
                best = cell
        if schedule and schedule[-1][2] == best[1]:
            schedule[-1] = (schedule[-1][0], b, best[1])
        else:
            schedule.append((low, b, best[1]))
        low = b + 1
    return Choice(rates, schedule)


def table(choice: Choice) -> str:
    """Tokens per second, a line for each concurrency and a column for each K; * marks the chosen K."""
    sizes, drafts = (sorted({cell[i] for cell in choice.rates}) for i in (0, 1))
    chosen = {b: k for b in sizes for low, high, k in choice.schedule if low <= b <= high}

    def shown(b: int, k: int) -> str:
        if (b, k) not in choice.rates:
            return "-"
        return f"{choice.rates[b, k]:,.0f}{'*' if chosen[b] == k else ''}"

    lines = [[str(b), *(shown(b, k) for k in drafts)] for b in sizes]
    return runs.table(["concurrency", *(f"K={k}" for k in drafts)], lines)


def option_text(choice: Choice) -> str:
    """The schedule as the option that takes it."""
    ranges = json.dumps(choice.schedule, separators=(",", ":"))
    return f"--num-speculative-tokens-per-batch-size '{ranges}'"
