"""Table of docs/decode-step.md: rounds whose requests draw from a part of the vocabulary, beside rounds that do not."""

from collections.abc import Sequence

from bench import labels

KEY = (
    "device", "model", "method", "num_speculative_tokens", "concurrency", "top_k", "top_p", "sha",
)  # fmt: skip
"""Fields that identify a row: those of different commits stand beside each other."""


def filtered_table(measured: Sequence[dict]) -> str:
    """Milliseconds of a round: commits, methods and requests down, filters across."""
    filters = sorted({_filters(row) for row in measured}, key=lambda one: (one[0] > 0, one[1] < 1))
    cells: dict[tuple, dict] = {}
    for row in measured:
        name = (row["sha"], labels.label(row), row["concurrency"])
        cells.setdefault(name, {})[_filters(row)] = f"{row['ms_per_round']:.2f}"
    lines = [[*map(str, name), *(one.get(f, "") for f in filters)] for name, one in cells.items()]
    header = ["commit", "method", "requests", *map(_title, filters)]
    what = f"{labels.listed(measured, 'device')}**, {labels.listed(measured, 'model')}, ms a round"
    return f"**{what}; {labels.provenance(measured)}\n\n{labels.markdown(header, lines)}"


def _filters(row: dict) -> tuple[int, float]:
    return row["top_k"], row["top_p"]


def _title(filters: tuple[int, float]) -> str:
    top_k, top_p = filters
    names = [f"top-k {top_k}"] * (top_k > 0) + [f"top-p {top_p:g}"] * (top_p < 1)
    return ", ".join(names) or "no filter"
