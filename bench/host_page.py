"""Tables of docs/host.md: what the host does for a round, and P-EAGLE beside EAGLE-3."""

import statistics
from collections.abc import Sequence

from bench import labels

_METHODS = ("none", "eagle3", "peagle")
_PARTS = ("schedule", "plan", "call", "output", "fetch", "commit")


def host_table(measured: Sequence[dict]) -> str:
    """One line per program, method and concurrency: the wall time of a round, and its parts on the host. A part of
    the table for each commit."""
    header = [
        "microseconds a round", "concurrency", "wall, median", "10 % below", "90 % below", *_PARTS,
    ]  # fmt: skip
    drawn = []
    for commit in dict.fromkeys(row["sha"] for row in measured):
        group = [row for row in measured if row["sha"] == commit]
        has_kernels = any("kernel_us_per_round" in row for row in group)
        lines = [
            [
                _name(row),
                str(row["concurrency"]),
                *(f"{row[name]:,.0f}" for name in ("us_per_round", "us_fastest", "us_slowest")),
                *(f"{us:,.0f}" for us in _parts(row)),
                *([_kernels(row)] if has_kernels else []),
            ]
            for row in group
        ]
        drawn.append(
            f"{_title(group)}\n\n{labels.markdown([*header, *['kernels'] * has_kernels], lines)}\n"
        )
    return "\n".join(drawn)


def methods_table(measured: Sequence[dict]) -> str:
    """Tokens per second of each method and microseconds a round of both heads, by concurrency: the median of the
    runs, then the fastest and the slowest one."""
    header = [
        "concurrency", "plain, tokens/s", "EAGLE-3, tokens/s", "P-EAGLE, tokens/s", "P-EAGLE / EAGLE-3",
        "EAGLE-3, us a round", "P-EAGLE, us a round", "P-EAGLE / EAGLE-3",
    ]  # fmt: skip
    cells = {(row["method"], row["concurrency"]): row for row in measured}
    lines = []
    for size in sorted({row["concurrency"] for row in measured}):
        speeds, rounds = (
            {method: _spread(cells.get((method, size)), name, factor) for method in _METHODS}
            for name, factor in (
                ("tokens_per_second_of_repeats", 1.0),
                ("ms_per_round_of_repeats", 1e3),
            )
        )
        lines.append(
            [
                str(size),
                *(speeds[method] for method in _METHODS),
                _ratio(cells, size, "tokens_per_second_of_repeats"),
                *(rounds[method] for method in _METHODS if method != "none"),
                _ratio(cells, size, "ms_per_round_of_repeats"),
            ]
        )
    return f"{_title(measured)}\n\n{labels.markdown(header, lines)}\n"


def _title(rows: Sequence[dict]) -> str:
    return f"**{labels.listed(list(rows), 'device')}**; {labels.provenance(list(rows))}"


def _name(row: dict) -> str:
    several = f", {row['rounds_per_call']} rounds a call" if row["rounds_per_call"] > 1 else ""
    return f"{labels.label(row)}, {row['program']}{several}"


def _kernels(row: dict) -> str:
    """Microseconds in which kernels run, and their share of the wall time of a round."""
    us = row.get("kernel_us_per_round")
    return "" if us is None else f"{us:,.0f} ({100 * us / row['us_per_round']:.0f} %)"


def _spread(row: dict | None, name: str, factor: float) -> str:
    if row is None:
        return ""
    runs = [factor * value for value in row[name]]
    return f"{statistics.median(runs):,.0f}; {min(runs):,.0f} to {max(runs):,.0f}"


def _ratio(cells: dict[tuple, dict], size: int, name: str) -> str:
    pair = [cells.get((method, size)) for method in ("peagle", "eagle3")]
    if None in pair:
        return ""
    ours, theirs = (statistics.median(row[name]) for row in pair)
    return f"{ours / theirs:.2f}"


def _parts(row: dict) -> list[float]:
    """Disjoint parts: the call is what is left of the dispatch, the commit does not contain the fetch."""
    parts = row["us_parts"]
    call = parts["dispatch"] - parts["plan"] - parts["output"]
    commit = parts["commit"] - parts["fetch"]
    return [
        parts["schedule"],
        parts["plan"],
        call,
        parts["output"],
        parts["fetch"],
        commit,
    ]
