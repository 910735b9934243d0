"""`peagle-bench lossless`: its options, and the table of its rows."""

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    METHODS,
    Command,
    ModelOptions,
    adaptive_option,
    check_jobs,
    check_num_drafts,
    check_preset,
    exit_code,
    gather_option,
    jobs_option,
    k_option,
    list_of_positive,
    methods_option,
    option,
    positive,
    rounds_per_call_option,
    rows_file,
    show,
)
from bench.commands.acceptance import SETS_HELP
from peagle_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(ModelOptions):
    """Options of a command that runs a loaded model, or a preset with random weights."""

    methods: tuple[str, ...] = methods_option(METHODS)
    k: tuple[int, ...] = k_option((3, 7))
    preset: str | None = option(
        "a full-size model with random weights, as for decode-step", default=None, metavar="NAME"
    )
    layers: int | None = option(
        "the first N layers of the preset", default=None, type=positive, metavar="N"
    )
    seed: int = option("seed of a preset's weights and prompts", default=0, type=int, metavar="N")
    set: str = option(f"{SETS_HELP}; not for presets", default="HumanEval", metavar="SET")
    prompt_tokens: int = option(
        "longest prompt of a preset, and length of prompts that are cut from text", default=256,
        type=positive, metavar="N",
    )  # fmt: skip
    prefill_chunk: int = option("tokens per prefill call", default=128, type=positive, metavar="N")
    prefill_rows: int = option("prompts per prefill call", default=8, type=positive, metavar="N")
    small_prefills: bool = option(
        "also compile smaller prefill programs, for calls with few tokens", default=False
    )
    tensor_parallel: int = option(
        "devices that run every round together", default=1, type=positive, metavar="N"
    )

    def check(self) -> None:
        if self.preset is None:
            super().check()
        else:
            check_num_drafts(self.k)
            check_preset(self.preset)


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions):
    tokens: int = option(
        "number of tokens to compare, of all cells together",
        default=20_000,
        type=positive,
        metavar="N",
    )
    concurrency: tuple[int, ...] = option(
        "requests at once", default=(1, 32), type=list_of_positive, metavar="N,N"
    )
    max_tokens: int = option("new tokens per prompt", default=256, type=positive, metavar="N")
    min_prompts: int = option(
        "least prompts of a cell; cells of low concurrency get fewer prompts, because they are slow", default=4, type=positive, metavar="N",
    )  # fmt: skip
    warm: bool = option(
        "cache each text up to the middle of its output, and compare the rest with a cold engine's",
        default=False,
    )
    adaptive: tuple[str, ...] = adaptive_option()
    rounds_per_call: int | None = rounds_per_call_option()
    page_size: int = option("tokens per page", default=64, type=positive, metavar="N")
    gather: str = gather_option()
    jobs: int = jobs_option()
    out: Path = rows_file("lossless.jsonl")

    def check(self) -> None:
        super().check()
        check_jobs(self)
        if self.jobs > 1 and self.preset is None:
            raise ConfigError(
                "--jobs compiles for shapes of a preset: add --preset, or leave it out"
            )
        if self.warm and self.adaptive != ("off",):
            raise ConfigError(
                "--warm compares acceptance, which changes with K: leave --adaptive out"
            )


def run(options: Options) -> int:
    from bench.lossless import lossless
    from peagle_jax.cli import runs

    header = ["method", "K", "by", "conc.", "texts", "equal", "tokens", "differ", "AL"]
    counts = ("texts", "texts_equal", "tokens_compared", "tokens_differing")
    done = list(lossless(options, options.environment()))
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            row.get("adaptive", ""),
            str(row["concurrency"]),
            *(f"{row[name]:,}" for name in counts),
            f"{row['acceptance_length']:.2f}",
        ]
        for row in done
    ]
    show(header, lines, options.out)
    if any(row["tokens_differing"] or row.get("acceptance_differing") for row in done):
        return 1
    if options.warm and not all(row["cached_tokens"] for row in done):
        print("peagle-bench: error: no prompt was found in the prefix cache", file=sys.stderr)
        return 1
    return exit_code(max(row["prompts_left_out"] for row in done))


COMMAND = Command(
    name="lossless",
    summary="greedy output with and without speculation, compared token by token",
    examples=(
        "lossless --preset qwen3-coder-30b-a3b-fp8 -K 3,7 --tokens 100000",
        "lossless --concurrency 1,8,32",
        "lossless --warm -K 7 --page-size 16",
        "lossless -K 7 --adaptive load --tokens 100000",
    ),
    description="""
Decodes the same prompts in every cell (a method, a K and a concurrency), and compares each output with the
reference: plain decoding at the largest concurrency. Exit code 1 if a token differs.

A preset has random weights, made on the device, and prompts of random tokens. Drafts of random heads are
almost never right, so seven of ten drafts are replaced by the reference's tokens. Drafts are then both
accepted and rejected. Without --preset the embedded model or --model is compared.

With --adaptive load the engine chooses K by times that are drawn at random, so that it changes in nearly
every call.

With --warm every cell decodes the first half of each output, and continues prompt and first half twice: with
what the prefix cache has of them, and computed as a whole. The tokens must be the reference's, and both must
accept the same drafts. Exit code 1 if a token or an acceptance differs, or if nothing was cached.
""",
    options=Options,
    run=run,
)
