"""The figure of tokens per second over concurrency with K by load, and the table of its targets."""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import harmonic_mean

from bench import labels, rows
from bench.synthetic import accepted_by_text

LEAST_OF_BEST, LEAST_OF_PLAIN = 0.98, 0.99
"""K by load must reach this share of the best fixed K, and of plain decoding."""


def speed(row: dict) -> float:
    """Output tokens per second while every slot decodes.

    Acceptance is drawn: each request has that of one text, so few requests may have other texts than those of the next
    cell. Where all rounds have one K, the median time of a round counts, with the acceptance of all texts. By
    load that is the K that was chosen last.
    """
    k = row["num_speculative_tokens"]
    if k == 0 or "synthetic_acceptance_set" not in row:
        return row["full_tokens_per_second"]
    drawn = row["synthetic_acceptance_rows"], row["synthetic_acceptance_set"]
    tokens = mean_length(*drawn, row.get("chosen_num_draft", k), at_least=k)
    return 1e3 * row["concurrency"] * tokens / row["ms_per_round"]


@cache
def mean_length(file: str, texts: str, k: int, *, at_least: int) -> float:
    """Tokens of a round with K = `k` while texts of equal length follow each other: tokens of all texts over their rounds.

    A text with few accepted drafts takes more rounds, so it weighs more: the harmonic mean of the texts' own means.

    Args:
      file: name of a file of rows, as in `synthetic.accepted_by_text`.
      texts: the set.
      at_least: K of the rows that count.
    """
    found = accepted_by_text(rows.read([rows.RESULTS / file]), at_least, texts)
    return harmonic_mean([1 + sum(min(n, k) for n in text) / len(text) for text in found if text])


def cell(row: dict) -> str:
    """Tokens per second, milliseconds of a round, and the K that the engine chose last."""
    chosen = f", K={row['chosen_num_draft']}" if row.get("adaptive") == "load" else ""
    return f"{speed(row):,.0f} ({row['ms_per_round']:.2f} ms{chosen})"


def targets_table(measured: Sequence[dict]) -> str:
    """For each concurrency, tokens per second of K by load relative to the best fixed K and to plain decoding."""
    header = ["concurrency", "best fixed", "by load, of best", "of plain", "missed"]
    lines = []
    for concurrency in sorted({row["concurrency"] for row in measured}):
        cells = [row for row in measured if row["concurrency"] == concurrency]
        find = lambda is_wanted, cells=cells: _best([row for row in cells if is_wanted(row)])
        plain = find(lambda row: row["method"] == "none")
        fixed = find(lambda row: row["method"] == "peagle" and row["adaptive"] == "off")
        if plain is None or fixed is None:
            continue
        load = find(lambda row: row["adaptive"] == "load")
        best = max((plain, fixed), key=speed)
        lines.append(
            [
                str(concurrency),
                f"{labels.label(best)}, {speed(best):,.0f}",
                _share(load, best),
                _share(load, plain),
                ", ".join(_missed(plain, fixed, load)),
            ]
        )
    return labels.markdown(header, lines)


def _best(cells: list[dict]) -> dict | None:
    return max(cells, key=speed, default=None)


def _share(row: dict | None, of: dict) -> str:
    return "" if row is None else f"{100 * speed(row) / speed(of):.1f} %"


def _missed(plain: dict, fixed: dict, load: dict | None) -> list[str]:
    """The targets that are not reached."""
    found = []
    if load is not None and speed(load) < LEAST_OF_BEST * speed(fixed):
        found.append(f"load: {LEAST_OF_BEST:.0%} of the best K")
    if load is not None and speed(load) < LEAST_OF_PLAIN * speed(plain):
        found.append(f"load: {LEAST_OF_PLAIN:.0%} of plain")
    return found


def page(grid: Callable[[list[dict], Callable[[dict], str]], str]) -> Callable[[list[dict]], str]:
    """Both tables of one setting.

    Args:
      grid: draws methods down and concurrencies across.
    """
    return lambda measured: f"{grid(measured, cell)}\n\n{targets_table(measured)}"
