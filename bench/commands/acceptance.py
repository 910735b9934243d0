"""`peagle-bench acceptance`: its options, and the table of its rows."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    DraftingOptions,
    chat_option,
    exit_code,
    methods_option,
    option,
    positive,
    rows_file,
    show,
)

SETS_HELP = "prompts: HumanEval, MT-Bench, or NAME=FILE (JSON lines, a text file, a folder of *.py)"


@dataclass(frozen=True, kw_only=True)
class Options(DraftingOptions):
    methods: tuple[str, ...] = methods_option(("eagle3", "peagle"))
    sets: tuple[str, ...] = option(
        SETS_HELP, default=("HumanEval", "MT-Bench"), nargs="+", metavar="SET"
    )
    num_prompts: int | None = option(
        "prompts per set; all without it", default=None, type=positive, metavar="N"
    )
    chat: bool | None = chat_option()
    concurrency: int = option("requests at once", default=8, type=positive, metavar="N")
    out: Path = rows_file("acceptance.jsonl")


def sweep_table(done: list[dict], out: Path) -> int:
    """Prints the rows of a sweep; returns the exit code."""
    from peagle_jax.cli import runs

    header = ["set", "method", "K", "conc.", "tokens/s", "x plain", "ms/round", "TTFT ms", "AL"]
    lines = [
        [
            row["set"],
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio_to_plain']:.2f}" if "ratio_to_plain" in row else "",
            f"{row['ms_per_round']:.2f}",
            f"{row['ttft_ms_median']:.0f}",
            f"{row['acceptance_length']:.2f}",
        ]
        for row in done
    ]
    show(header, lines, out)
    return exit_code(sum(row["prompts_left_out"] for row in done))


def run(options: Options) -> int:
    from bench.acceptance import acceptance

    return sweep_table(acceptance(options, options.environment()), options.out)


COMMAND = Command(
    name="acceptance",
    summary="acceptance length and acceptance rate per drafted position, by head, K and prompt set",
    examples=("acceptance --sets HumanEval --num-prompts 20 -K 3,7",),
    description="""
Decodes prompt sets with each head and each K (drafts per round). A row has the acceptance length (AL, tokens
per round) and, for each drafted position, the share of rounds in which the draft became output. Acceptance
depends on the text, not on the device, so a CPU is enough.
""",
    options=Options,
    run=run,
)
