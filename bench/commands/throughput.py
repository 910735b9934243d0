"""`peagle-bench throughput`: its options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    DraftingOptions,
    adaptive_option,
    chat_option,
    check_jobs,
    jobs_option,
    list_of_positive,
    option,
    positive,
    rounds_per_call_option,
    rows_file,
)
from bench.commands.acceptance import SETS_HELP, sweep_table


@dataclass(frozen=True, kw_only=True)
class Options(DraftingOptions):
    set: str = option(SETS_HELP, default="HumanEval", metavar="SET")
    chat: bool | None = chat_option()
    concurrency: tuple[int, ...] = option(
        "requests at once", default=(1, 2, 4, 8, 16, 32), type=list_of_positive, metavar="N,N"
    )
    prompts_per_slot: int = option(
        "prompts of a cell for each concurrent request", default=2, type=positive, metavar="N"
    )
    min_prompts: int = option("least prompts of a cell", default=4, type=positive, metavar="N")
    prefill_chunk: int | None = option(
        "tokens of a prompt per prefill call; default: 512 on a GPU, else 128", default=None, type=positive, metavar="N"
    )  # fmt: skip
    prefill_rows: int | None = option(
        "prompts per prefill call; default: 4 on a GPU, else 1", default=None, type=positive, metavar="N"
    )  # fmt: skip
    small_prefills: bool | None = option(
        "also compile smaller prefill programs, for calls with few tokens; default: on a GPU", default=None,
        action=argparse.BooleanOptionalAction,
    )  # fmt: skip
    adaptive: tuple[str, ...] = adaptive_option()
    rounds_per_call: int | None = rounds_per_call_option()
    repeats: int = option(
        "runs of a cell, of which the row has the median; the runs of a concurrency then alternate between all methods",
        default=1, type=positive, metavar="N",
    )  # fmt: skip
    jobs: int = jobs_option()
    out: Path = rows_file("throughput.jsonl")

    def check(self) -> None:
        super().check()
        check_jobs(self)


def run(options: Options) -> int:
    from bench.throughput import throughput

    return sweep_table(throughput(options, options.environment()), options.out)


COMMAND = Command(
    name="throughput",
    summary="output tokens per second of plain decoding, EAGLE-3 and P-EAGLE, by K and concurrency",
    examples=(
        "throughput --concurrency 1,8,32 -K 7",
        "throughput --methods none,peagle -K 7 --adaptive off,load --repeats 5",
    ),
    description="""
Decodes the same prompts in every cell (a method, a K and a concurrency), one cell after the other, in one
process. The batch buckets are the concurrencies. K is the number of drafts per round. A row has tokens per second, milliseconds per round, time to first
token (TTFT), the ratio to plain decoding, and the floor (the least time of a round, from its bytes and
operations). With --adaptive load the engine chooses K of each round, at most the given one (docs/adaptive.md); the
rows of such a comparison have the kind "adaptive"; those of several repeats at fixed K the kind "methods".
""",
    options=Options,
    run=run,
)
