"""Tables of reliability results: randomised tests, attacks, losslessness."""

from collections.abc import Iterable

KINDS = ("reliability", "hostile", "lossless")


def newest(all_rows: Iterable[dict]) -> list[dict]:
    """The last row of each randomised test and number of cases, and of each attack and machine.

    Rows of losslessness are not among them: `report.newest` chooses those.
    """
    latest: dict[tuple, dict] = {}
    for row in sorted(all_rows, key=lambda row: row.get("date", "")):
        if row["kind"] == "reliability":
            latest[row["tried"], row["cases"]] = row
        elif row["kind"] == "hostile":
            latest.pop((row["attack"], row["device"]), None)  # the order is that of the newest run
            latest[row["attack"], row["device"]] = row
    return list(latest.values())


def tried_table(rows: list[dict], markdown) -> str:
    """One line for each kind and number of cases: cases, result, seconds, commit.

    Args:
      markdown: draws a header and lines.
    """
    chosen = sorted(
        (row for row in rows if row["kind"] == "reliability"),
        key=lambda row: (row["tried"], row["cases"]),
    )
    lines = [
        [row["tried"], f"{row['cases']:,}", _result(row), f"{row['seconds']:,.0f}", *_origin(row)]
        for row in chosen
    ]
    lines += [
        [
            f"attack, {row['attack']}",
            f"{row['attempts']:,}",
            f"missed: {', '.join(row['missed'])}" if row["missed"] else "all targets met",
            f"{row['seconds']:,.0f}",
            *_origin(row),
        ]
        for row in rows
        if row["kind"] == "hostile"
    ]
    lines += _lossless_lines([row for row in rows if row["kind"] == "lossless"])
    return markdown(["what", "cases", "result", "seconds", "commit", "date"], lines)


def _origin(row: dict) -> list[str]:
    return [row["sha"], row["date"][:10]]


def _result(row: dict) -> str:
    return f"failed: {', '.join(row['failed'])}" if row["failed"] else "passed"


def _lossless_lines(rows: list[dict]) -> list[list[str]]:
    """One line for each model, layers and device; tokens are the cases."""
    name = lambda row: (
        f"greedy tokens beside plain decoding, {row['model']} on {row['device']}",
        row["sha"],
    )
    lines = []
    for key in dict.fromkeys(map(name, rows)):
        chosen = [row for row in rows if name(row) == key]
        differ = sum(row["tokens_differing"] for row in chosen)
        lines.append(
            [
                key[0],
                f"{sum(row['tokens_compared'] for row in chosen):,}",
                f"{differ:,} differ" if differ else "all equal",
                f"{sum(row.get('seconds', 0.0) for row in chosen):,.0f}",
                key[1],
                max(row["date"] for row in chosen)[:10],
            ]
        )
    return lines


def hostile_table(rows: list[dict], markdown) -> str:
    """One line for each attack: effect on honest clients, and resources of the server."""
    header = [
        "attack", "requests", "wrong answers", "health p99, ms: quiet", "under attack", "prober late",
        "gap p99, ms: quiet", "under attack", "memory, MB: before", "peak", "after", "log, MB a minute", "descriptors", "service, CPU s",
        "attackers, CPU s",
    ]  # fmt: skip
    lines = []
    for row in rows:
        under, memory = row["under_attack"], row["memory_mb"]
        health = lambda seen: max(seen[x]["p99"] for x in ("health_ms", "rpc_health_ms"))
        lines.append(
            [
                row["attack"],
                f"{row['attempts']:,}",
                f"{row['wrong']:,}",
                f"{health(row['quiet']):,.0f}",
                f"{health(under):,.0f}",
                f"{under['prober_late_ms']['p99']:,.0f}",
                f"{row['quiet']['gap_ms']['p99']:,.0f}",
                f"{under['gap_ms']['p99']:,.0f}",
                *(f"{memory[name]:,.0f}" for name in ("before", "peak", "after")),
                f"{row['log_mb_per_minute']:.2f}",
                f"{row['descriptors']['peak']:,}",
                f"{row['service_cpu_seconds']:.1f}",
                f"{row['attackers_cpu_seconds']:.1f}",
            ]
        )
    return markdown(header, lines)
