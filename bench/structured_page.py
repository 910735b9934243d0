"""Tables of docs/structured.md: rounds of constrained requests, and the masks of large vocabularies."""

from collections.abc import Sequence

from bench import labels
from peagle_jax.cli.runs import METHOD_NAMES

MODES = ("free", "masks", "forced")


def rounds_table(measured: Sequence[dict]) -> str:
    """One line per model, method and number of requests: AL and milliseconds of a round in each mode, and the
    masks of all requests."""
    header = ["", "requests", *(f"{mode}: AL, ms a round" for mode in MODES), "masks, ms"]
    if has_parts := any("us_parts" in row for row in measured):
        header.append("forced: waiting for the device, ms")
    cells = {(_subject(row), row["concurrency"], row["mode"]): row for row in measured}
    lines = []
    for subject, size in dict.fromkeys((_subject(row), row["concurrency"]) for row in measured):
        found = [cells.get((subject, size, mode)) for mode in MODES]
        masked = [row["masks_ms"] for row in found if row is not None and "masks_ms" in row]
        lines.append(
            [
                subject,
                str(size),
                *("" if row is None else _round(row) for row in found),
                f"{min(masked):.2f}" if masked else "",
                *[_waiting(found[-1])] * has_parts,
            ]
        )
    return f"{labels.markdown(header, lines)}\n\n{labels.provenance(list(measured))}"


def masks_table(measured: Sequence[dict]) -> str:
    """One line per processor and kind of strings: median and largest milliseconds of the masks of a call, by the
    number of requests."""
    sizes = sorted({row["concurrency"] for row in measured})
    header = [
        "",
        *(f"{size} request{'s' * (size > 1)}" for size in sizes),
        "one request, processor",
    ]
    cells = {(_processor(row), row["strings"], row["concurrency"]): row for row in measured}
    lines = []
    for processor, strings in dict.fromkeys((_processor(row), row["strings"]) for row in measured):
        found = [cells.get((processor, strings, size)) for size in sizes]
        spread = lambda row: f"{row['masks_ms']:.2f}; {row['masks_ms_max']:.1f}"
        lines.append(
            [
                f"{processor}: {strings}",
                *("" if row is None else spread(row) for row in found),
                "" if found[0] is None else f"{found[0]['cpu_ms'] / found[0]['concurrency']:.2f}",
            ]
        )
    return f"{labels.markdown(header, lines)}\n\n{labels.provenance(list(measured))}"


def ends_table(measured: Sequence[dict]) -> str:
    """One line per model, schema and temperature: the share of texts that `max_tokens` ended, by white space."""
    spaces = list(dict.fromkeys(row["spaces"] for row in measured))
    line = lambda row: (_subject(row), row["schema"], row["temperature"])
    cells = {(*line(row), row["spaces"]): row for row in measured}
    share = lambda row: "" if row is None else f"{row['cut']} of {row['texts']}"
    lines = [
        [*map(str, one), *(share(cells.get((*one, name))) for name in spaces)]
        for one in dict.fromkeys(map(line, measured))
    ]
    header = ["", "schema", "temperature", *(f"white space {name}" for name in spaces)]
    tokens = labels.listed(list(measured), "max_tokens")
    return f"{labels.markdown(header, lines)}\n\nAt most {tokens} tokens; {labels.provenance(list(measured))}"


def _waiting(row: dict | None) -> str:
    parts = {} if row is None else row.get("us_parts", {})
    return f"{parts['fetch'] / 1e3:.2f}" if parts else ""


def _subject(row: dict) -> str:
    return f"{row['model']}, {METHOD_NAMES[row['method']]} K={row['num_draft']}, {row['device']}"


def _processor(row: dict) -> str:
    threads = f", {row['threads']} threads" if row.get("threads") else ""
    return f"{row['device']}, {row['vocab_size']:,} tokens{threads}"


def _round(row: dict) -> str:
    return f"{row['acceptance_length']:.2f}, {row['ms_per_round']:.2f}"
