"""Tables of served full-size models (`serve-load --preset`), and the README's blocks of speed, which are of served models
where there are such rows."""

from collections.abc import Callable

from bench import headline, labels

KEY = (
    "device", "model", "protocol", "method", "num_speculative_tokens", "synthetic_acceptance_length", "concurrency", "rate",
    "duration", "prompt_tokens", "max_tokens", "api_processes",
)  # fmt: skip
"""Fields that identify a row."""
NAMES = {"grpc": "gRPC", "http": "HTTP"}
_HEADING = "## Served models\n\n"
_NOTE = (
    "A server on the device with random weights and made-up tokens, clients in other processes of the same machine. "
    "Bare is the engine without the service, in the same command with the same requests. Gaps are between two messages "
    "of a stream, over all streams."
)


def served_table(rows: list[dict]) -> str:
    """One line per load and protocol, with a heading; a line of the start below each setting. Empty without rows."""
    if not rows:
        return ""
    return f"{_HEADING}{_NOTE}\n\n" + "\n".join(
        f"{labels.title(setting, group)}\n\n{_loads(group)}\n\n{_starts(group)}\n"
        for setting, group in labels.settings(rows)
    )


def _loads(group: list[dict]) -> str:
    header = [
        "load", "protocol", "tokens/s", "bare, tokens/s", "served / bare", "time to first token, ms: p50, p99",
        "per token, ms: p50, p99", "gap, ms: p50, p99, longest", "statuses",
    ]  # fmt: skip
    order = lambda row: (
        row["concurrency"] or 0, row["rate"] or 0, row["api_processes"], row["protocol"],
    )  # fmt: skip
    return labels.markdown(
        header,
        [
            [
                _load(row),
                NAMES[row["protocol"]],
                f"{row['tokens_per_second']:,.0f}",
                _if_measured(row, "bare_tokens_per_second", "{:,.0f}"),
                _if_measured(row, "served_over_bare", "{:.2f}"),
                *(_listed(row[name], "p50", "p99") for name in ("ttft_ms", "tpot_ms")),
                _listed(row["gap_ms"], "p50", "p99", "max"),
                ", ".join(f"{count:,} {code}" for code, count in row["codes"].items()),
            ]
            for row in sorted(group, key=order)
        ],
    )


def _load(row: dict) -> str:
    if row["rate"] is not None:
        return f"{row['rate']:g} requests/s"
    seconds = "" if row["duration"] is None else f", mixed lengths for {row['duration']} s"
    servers = "" if row["api_processes"] == 1 else f", {row['api_processes']} API processes"
    return f"{row['concurrency']} requests{seconds}{servers}"


def _listed(found: dict | None, *names: str) -> str:
    return "" if found is None else ", ".join(f"{found[name]:,.1f}" for name in names)


def _if_measured(row: dict, name: str, form: str) -> str:
    return form.format(row[name]) if name in row else ""


def _starts(group: list[dict]) -> str:
    """A line for each start of a server that the rows are of; the first start has compiled what was not on disk."""
    return "\n\n".join(_start(row) for row in {row["port_seconds"]: row for row in group}.values())


def _start(row: dict) -> str:
    held = ", ".join(f"{one['role']} {one['resident_mib']:,.0f} MiB" for one in row["processes"])
    if shares := row.get("lock_shares"):
        locks = ", ".join(f"{one['role']} {one['share']:.0%}" for one in shares)
        held += f". Share of the time with the interpreter's lock: {locks}"
    return (
        f"From the start to the ports {row['port_seconds']:.0f} s, to SERVING with all programs loaded "
        f"{row['programs_seconds']:.0f} s, with {row['programs_on_disk']} programs on disk. Resident memory: {held}."
    )


def speed_rows(rows: list[dict]) -> list[dict]:
    """Served rows of the README's model at fixed concurrencies; may be none."""
    return [
        row
        for row in rows
        if (row["kind"], row.get("model")) == ("served", headline.SHAPE)
        and row["synthetic_acceptance_length"] == headline.SYNTHETIC
        and row["prompt_tokens"] == headline.PROMPT
        and row["rate"] is None
        and row["duration"] is None
        and row["api_processes"] == 1
        and "served_over_bare" in row
    ]


def speed_table(rows: list[dict]) -> str:
    """Tokens per second of the bare engine and by each protocol, by concurrency; without rows of kind served
    `headline.beside_table`, whose errors it raises."""
    if not (chosen := speed_rows(rows)):
        return headline.beside_table(rows)
    across = sorted({row["concurrency"] for row in chosen})
    lines = [["bare engine", *_across(chosen, across, lambda row: f"{_bare(row):,.0f}")]]
    for protocol, name in NAMES.items():
        some = [row for row in chosen if row["protocol"] == protocol]
        cell = lambda row: f"{row['tokens_per_second']:,.0f} ({row['served_over_bare']:.2f})"
        lines.append([f"served by {name} (of bare)", *_across(some, across, cell)])
        cell = lambda row: _listed(row["ttft_ms"], "p50", "p99")
        lines.append([f"{name}, ms to first token: p50, p99", *_across(some, across, cell)])
    header = ["tokens/s", *(f"concurrency {one}" for one in across)]
    setting, _ = labels.settings(chosen)[0]
    return f"{labels.title(setting, chosen)}\n\n{labels.markdown(header, lines)}"


def _across(some: list[dict], across: list[int], cell: Callable[[dict], str]) -> list[str]:
    cells = {row["concurrency"]: cell(row) for row in some}
    return [cells.get(one, "") for one in across]


def _bare(row: dict) -> float:
    return row["bare_tokens_per_second"]


def speed_figure(rows: list[dict]) -> str:
    """The README's plot of speed with its caption; raises as `headline.shape_caption` does."""
    if not (chosen := speed_rows(rows)):
        image = "![Tokens per second of a 30B model by method and concurrency]"
        return f"{image}(bench/results/shape.png)\n\n{headline.shape_caption(rows)}"
    return (
        "![Tokens per second of a served 30B model by protocol and concurrency](bench/results/served.png)\n\n"
        f"Qwen3-Coder-30B-A3B in FP8 on one {labels.listed(chosen, 'device')}, served with P-EAGLE, random weights, "
        f"temperature {chosen[0]['temperature']:g}, {headline.PROMPT} prompt tokens, output tokens/s with the prefill. The "
        f"synthetic AL (tokens per round) is {headline.SYNTHETIC}: as many drafts are accepted as give it "
        f"({labels.provenance(chosen)})."
    )


def lines_of(chosen: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Lines of the plot: name -> (concurrency, tokens per second), ascending."""
    bare = {row["concurrency"]: _bare(row) for row in chosen}
    found = {"bare engine": sorted(bare.items())}
    for protocol, name in NAMES.items():
        some = [row for row in chosen if row["protocol"] == protocol]
        points = [(row["concurrency"], row["tokens_per_second"]) for row in some]
        if points:
            found[f"served by {name}"] = sorted(points)
    return found
