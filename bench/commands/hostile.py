"""`peagle-bench hostile`: its options, and the table of its rows."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowOptions, option, positive, rows_file, show


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    only: tuple[str, ...] = option(
        "run attacks whose name contains TEXT; repeatable",
        default=(),
        action="append",
        metavar="TEXT",
    )
    seconds: float = option("seconds of an attack", default=10.0, type=float, metavar="S")
    hold: float = option(
        "most seconds that an attack holds a silent connection",
        default=75.0,
        type=float,
        metavar="S",
    )
    quiet: float = option(
        "seconds without an attack that are measured before each attack", default=5.0, type=float,
        metavar="S",
    )  # fmt: skip
    scale: float = option(
        "factor on the number of hostile requests", default=1.0, type=float, metavar="X"
    )
    descriptors: int = option(
        "file descriptors that the server may open", default=300, type=positive, metavar="N"
    )
    together: bool = option(
        "run all attacks at once at the end (default: yes)",
        default=True,
        action=argparse.BooleanOptionalAction,
    )
    repeats: int = option(
        "most repeats of a measurement in which other work delayed the measuring process", default=2,
        type=int, metavar="N",
    )  # fmt: skip
    serve_options: tuple[str, ...] = option(
        "options of peagle-serve", default=(), positional=True, nargs="*", metavar="-- OPTION"
    )
    out: Path = rows_file("hostile.jsonl")


def run(options: Options) -> int:
    from bench.hostile import hostile

    ms = lambda found: f"{found['p99']:.0f}/{found['max']:.0f}"
    header = ["attack", "requests", "wrong", "health", "gRPC health", "gap", "quiet gap", "late"]
    header += ["MB before/peak/after", "log MB/min", "files", "service s", "attackers s"]
    header += ["missed"]
    done = hostile(options, options.environment())
    lines = [
        [
            row["attack"],
            f"{row['attempts']:,}",
            f"{row['wrong']:,}",
            ms(row["under_attack"]["health_ms"]),
            ms(row["under_attack"]["rpc_health_ms"]),
            ms(row["under_attack"]["gap_ms"]),
            ms(row["quiet"]["gap_ms"]),
            ms(row["under_attack"]["prober_late_ms"]),
            "/".join(f"{value:.0f}" for value in row["memory_mb"].values()),
            f"{row['log_mb_per_minute']:.2f}",
            "/".join(map(str, row["descriptors"].values())),
            f"{row['service_cpu_seconds']:.1f}",
            f"{row['attackers_cpu_seconds']:.1f}",
            " ".join(row["missed"]),
        ]
        for row in done
    ]
    show(header, lines, options.out, note="milliseconds: p99/max; seconds: processor time; ")
    return 1 if any(row["missed"] for row in done) else 0


COMMAND = Command(
    name="hostile",
    summary="attacks on a server: health, latency, memory, log and statuses that honest clients see",
    examples=('hostile --only "prompt ids" --only "silent" -- --max-num-seqs 4',),
    description="""
Starts a peagle-serve (options after -- are its options), runs each attack and then all together, and
reports the effect on honest clients. Exit code 1 if a target is missed:

- every attack gets the right status;
- the p99 of health probes is at most 100 ms;
- the p99 of the gap between two messages of a stream is at most 1.5 times that without an attack;
- memory returns to within 200 MB of its value before the attack;
- the log grows by less than 1 MB a minute.
""",
    options=Options,
    run=run,
)
