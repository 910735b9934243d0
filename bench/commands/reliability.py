"""`peagle-bench reliability`: its options, and the table of its rows."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import RESULTS, Command, RowOptions, option, positive, rows_file, show


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    cases: int | None = option(
        "number of cases of each test; each test's own number without it",
        default=None,
        type=positive,
        metavar="N",
    )
    only: tuple[str, ...] = option(
        "run kinds of cases whose name contains KIND; repeatable", default=(), action="append",
        metavar="KIND",
    )  # fmt: skip
    page: Path = option(
        "page whose tables are redrawn", default=RESULTS.parents[1] / "docs" / "reliability.md",
        type=Path, metavar="FILE",
    )  # fmt: skip
    tests: tuple[str, ...] = option(
        "test files or tests; all without it",
        default=(),
        positional=True,
        nargs="*",
        metavar="TEST",
    )
    out: Path = rows_file("reliability.jsonl")


def run(options: Options) -> int:
    from bench.reliability import reliability

    done = reliability(options, options.environment())
    lines = [
        [
            row["tried"],
            f"{row['cases']:,}",
            str(row["tests"]),
            f"{row['seconds']:.1f}",
            " ".join(row["failed"]) or "passed",
        ]
        for row in done
    ]
    show(["tried", "cases", "tests", "seconds", "result"], lines, options.out)
    return 1 if any(row["failed"] for row in done) else 0


COMMAND = Command(
    name="reliability",
    summary="randomised tests: number of cases and result, by kind of case",
    examples=('reliability --cases 100000 --only "safetensors"',),
    description="""
Runs the tests that draw random cases, with more cases if asked, appends the number of cases of each kind
and the result, and redraws the tables of docs/reliability.md. Exit code 1 if a test fails.
""",
    options=Options,
    run=run,
)
