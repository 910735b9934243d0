"""The table of what the host does for a round (docs/host.md)."""

from collections.abc import Sequence

from bench import labels

_PARTS = ("schedule", "plan", "call", "output", "fetch", "commit")


def host_table(measured: Sequence[dict]) -> str:
    """One line per program, method and concurrency: the wall time of a round, and its parts on the host."""
    header = [
        "microseconds a round", "concurrency", "wall, median", "10 % below", "90 % below", *_PARTS,
    ]  # fmt: skip
    lines = [
        [
            f"{labels.label(row)}, {row['program']}",
            str(row["concurrency"]),
            *(f"{row[name]:,.0f}" for name in ("us_per_round", "us_fastest", "us_slowest")),
            *(f"{us:,.0f}" for us in _parts(row)),
        ]
        for row in measured
    ]
    device = labels.listed(list(measured), "device")
    return (
        f"**{device}**; {labels.provenance(list(measured))}\n\n{labels.markdown(header, lines)}\n"
    )


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
