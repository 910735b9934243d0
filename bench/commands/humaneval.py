"""`peagle-bench humaneval`: its options, and the table of its rows."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    SweepOptions,
    k_option,
    methods_option,
    option,
    positive,
    rows_file,
    show,
)
from peagle_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    methods: tuple[str, ...] = methods_option(("peagle",))
    k: tuple[int, ...] = k_option((7,))
    samples: int = option("samples of each problem", default=20, type=positive, metavar="N")
    num_prompts: int | None = option(
        "number of problems; all 164 without it", default=None, type=positive, metavar="N"
    )
    concurrency: int = option("requests at once", default=16, type=positive, metavar="N")
    max_tokens: int = option("new tokens per sample", default=256, type=positive, metavar="N")
    temperature: float = option(
        "temperature; 0: greedy, one sample", default=0.2, type=float, metavar="T"
    )
    top_p: float = option(
        "sample from the most likely tokens, up to probability P together",
        default=0.95,
        type=float,
        metavar="P",
    )
    seed: int = option("seed of the first sample", default=0, type=int, metavar="N")
    out: Path = rows_file("humaneval.jsonl")

    def check(self) -> None:
        super().check()
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError("greedy samples are all equal; add --samples 1 or a --temperature")


def run(options: Options) -> int:
    from bench.humaneval import humaneval
    from peagle_jax.cli import runs

    done = humaneval(options, options.environment())
    header = ["method", "K", "T", "samples", "pass@1", "pass@10", "solved", "empty", "repeated"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            f"{row['temperature']:g}",
            str(row["samples"]),
            f"{row['pass@1']:.1%}",
            f"{row['pass@10']:.1%}" if "pass@10" in row else "",
            f"{row['solved']} of {row['problems']}",
            f"{row['empty']:.1%}",
            f"{row['repeated_8grams']:.1%}",
        ]
        for row in done
    ]
    show(header, lines, options.out)
    return 0


COMMAND = Command(
    name="humaneval",
    summary="share of HumanEval's problems that a model solves: pass@1 and pass@10",
    examples=("humaneval --temperature 0 --samples 1", "humaneval --samples 20 --num-prompts 40"),
    description="""
Completes the functions of HumanEval and runs their tests, each in a process without network, files or
other processes, and with limited time and memory (Linux on x86-64 or aarch64). Drafts do not change the
distribution of the text, so one method is enough. A row has pass@1 and pass@10 (the chance that one, or one
of ten, samples passes), how programs ended, the share of completions without text, and the share of repeated
8-grams of tokens.
""",
    options=Options,
    run=run,
)
