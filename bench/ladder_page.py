"""Tables of the ladder: what `peagle-bench kernels --ladder` prints, and the one of docs/ladder.md."""

from collections.abc import Sequence

from bench import labels
from bench.ladder import failed
from pallas_kernels.ladder import specs

HEADER = [
    "step, weight, rows", "floor, us", "predicted, us", "TB/s", "measured, us", "TB/s",
    "of the bandwidth",
]  # fmt: skip
NOT_MEASURED = "compiled, not measured"


def newest(all_rows: Sequence[dict]) -> list[dict]:
    """The last row of each spec and device."""
    found: dict[tuple, dict] = {}
    for row in sorted(all_rows, key=lambda row: row.get("date", "")):
        if row["kind"] == "ladder" and row["spec"] in specs.SPECS:
            found[row["device"], row["spec"]] = row
    return list(found.values())


def lines(some: Sequence[dict]) -> list[list[str]]:
    """Cells of `HEADER` for rows of `bench.ladder`."""
    return [
        [
            row["spec"],
            f"{row['floor_us']:.1f}",
            f"{row['predicted_us']:.1f} ({row['predicted_limit']})",
            f"{row['bytes'] / row['predicted_us'] / 1e6:.2f}",
            _measured(row),
            "" if row["us"] is None else f"{row['bytes_per_second'] / 1e12:.2f}",
            "" if row["fraction_of_bandwidth"] is None else f"{row['fraction_of_bandwidth']:.0%}",
        ]
        for row in some
    ]


def _measured(row: dict) -> str:
    if row["us"] is None:
        return row["error"]
    return f"{row['us']:.1f}" + (f" ({row['error']})" if row["error"] else "")


def table(some: Sequence[dict]) -> str:
    """Markdown for docs/ladder.md: all specs, with their predictions, for each device that has rows."""
    parts = []
    for device in dict.fromkeys(row["device"] for row in some) or [None]:
        own = {row["spec"]: row for row in some if row["device"] == device}
        cells = lines([own.get(name) or failed(name, NOT_MEASURED) for name in specs.SPECS])
        where = f"**{device}**; {labels.provenance(list(own.values()))}\n\n" if own else ""
        parts.append(f"{where}{labels.markdown(HEADER, cells)}\n")
    return "\n".join(parts)
