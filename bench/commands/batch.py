"""`peagle-bench batch`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowFileOptions, jobs_option, option, positive, rows_file


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RowFileOptions):
    file: Path = option(
        "file with commands of peagle-bench, one a line; a blank line begins a new process", positional=True, type=Path,
        metavar="FILE",
    )  # fmt: skip
    jobs: int = jobs_option()
    seconds: int | None = option(
        "end of the last command, counted from the start of the first",
        default=None,
        type=positive,
        metavar="N",
    )
    least_seconds: int = option(
        "a process that would have less time is left out", default=20, type=positive, metavar="N"
    )
    out: Path = rows_file("rows.jsonl")


def run(options: BatchOptions) -> int:
    from bench.batch import batch

    return batch(options)


COMMAND = Command(
    name="batch",
    summary="the commands of a file one after the other within a time, compiled beforehand side by side",
    examples=("batch bench/data/two_gpus.txt --jobs 24 --seconds 540 --out rows.jsonl",),
    description="""
Runs the commands of a file, without "peagle-bench" in front, and gives each of them --out and --sha. Rows are written as
they come. A blank line begins a new process; commands of one process over one preset share its weights. The comment
"# at most N s" above a command ends its process after N seconds; "# while the others compile" begins it as soon as its own
programs are compiled, for commands whose times do not matter; "# environment NAME=VALUE" sets a variable of the environment of its
process. A process that fails or is ended does not stop the next one. With --jobs all programs of decode-step and of lossless --preset compile side by side first, in the order of
the file; the processes load them from the cache folder. Exit code 1 if a process failed, was ended or was left out.
""",
    options=BatchOptions,
    run=run,
)
