"""The figure of tokens per second over concurrency with K by load and by survival, and what it says of the targets."""

from collections.abc import Callable, Sequence

from bench import labels

LEAST_OF_BEST, LEAST_OF_PLAIN = 0.98, 0.99
"""K by load must reach this share of the best fixed K, and of plain decoding."""

SURVIVAL_GAINS = {32: 1.04, 128: 1.14}
"""Concurrency -> what the choice by survival should reach of the best fixed K."""


def speed(row: dict) -> float:
    """Output tokens per second while every slot decodes."""
    return row["full_tokens_per_second"]


def cell(row: dict) -> str:
    """Tokens per second, milliseconds of a round, and the K that the engine chose last."""
    chosen = f", K={row['chosen_num_draft']}" if row.get("adaptive") == "load" else ""
    return f"{speed(row):,.0f} ({row['ms_per_round_mean']:.2f} ms{chosen})"


def targets_table(measured: Sequence[dict]) -> str:
    """For each concurrency, what K by load and by survival reach of the best fixed K of P-EAGLE and of plain decoding."""
    header = [
        "concurrency", "best fixed", "by load, of best", "of plain", "by survival, of best", "missed",
    ]  # fmt: skip
    lines = []
    for concurrency in sorted({row["concurrency"] for row in measured}):
        cells = [row for row in measured if row["concurrency"] == concurrency]
        find = lambda is_wanted, cells=cells: _best([row for row in cells if is_wanted(row)])
        plain = find(lambda row: row["method"] == "none")
        fixed = find(lambda row: row["method"] == "peagle" and row["adaptive"] == "off")
        if plain is None or fixed is None:
            continue
        load, survival = (
            find(lambda row, name=name: row["adaptive"] == name) for name in ("load", "survival")
        )
        best = max((plain, fixed), key=speed)
        lines.append(
            [
                str(concurrency),
                f"{labels.label(best)}, {speed(best):,.0f}",
                _share(load, best),
                _share(load, plain),
                _share(survival, fixed),
                ", ".join(_missed(concurrency, plain, fixed, load, survival)),
            ]
        )
    return labels.markdown(header, lines)


def _best(cells: list[dict]) -> dict | None:
    return max(cells, key=speed, default=None)


def _share(row: dict | None, of: dict) -> str:
    return "" if row is None else f"{100 * speed(row) / speed(of):.1f} %"


def _missed(
    concurrency: int, plain: dict, fixed: dict, load: dict | None, survival: dict | None
) -> list[str]:
    """The targets that are not reached."""
    found = []
    if load is not None and speed(load) < LEAST_OF_BEST * speed(fixed):
        found.append(f"load: {LEAST_OF_BEST:.0%} of the best K")
    if load is not None and speed(load) < LEAST_OF_PLAIN * speed(plain):
        found.append(f"load: {LEAST_OF_PLAIN:.0%} of plain")
    gain = SURVIVAL_GAINS.get(concurrency)
    if survival is not None and gain is not None and speed(survival) < gain * speed(fixed):
        found.append(f"survival: {gain:.0%} of the best K")
    return found


def page(grid: Callable[[list[dict], Callable[[dict], str]], str]) -> Callable[[list[dict]], str]:
    """Both tables of one setting.

    Args:
      grid: draws methods down and concurrencies across.
    """
    return lambda measured: f"{grid(measured, cell)}\n\n{targets_table(measured)}"
