"""`peagle-bench decode-step`: its options, and the tables of its rows."""

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from bench.command import (
    METHODS,
    Command,
    RowOptions,
    adaptive_option,
    check_jobs,
    check_num_drafts,
    check_preset,
    dtype_option,
    gather_option,
    jobs_option,
    list_of_methods,
    list_of_positive,
    option,
    positive,
    rounds_per_call_option,
    rows_file,
    show,
)
from peagle_jax.errors import ConfigError
from peagle_jax.models.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    preset: str = option("model, of those above; NAME-fp8: in FP8 blocks", metavar="NAME")
    weights: str = option("source of the weights", default="random", choices=("random",))
    layers: int | None = option("the first N layers only", default=None, type=positive, metavar="N")
    method: tuple[str, ...] = option(
        "methods to time", default=METHODS, type=list_of_methods, metavar="M,M"
    )
    k: tuple[int, ...] = option(
        "numbers of drafts per round; 7 without it", default=(), short="-K", type=list_of_positive,
        metavar="K,K",
    )  # fmt: skip
    concurrency: tuple[int, ...] = option(
        "requests at once", default=(1, 8, 32), type=list_of_positive, metavar="N,N"
    )
    variants: tuple[str, ...] = option(
        "in place of --method, -K and --adaptive: none, METHOD:K or METHOD:K:ADAPTIVE, for example peagle:7:load",
        default=(), nargs="+", metavar="V",
    )  # fmt: skip
    presence_penalty: float = option(
        "of all requests: measures rounds with sampling controls; rows of the kind controlled-step",
        default=0.0, type=float, metavar="F",
    )  # fmt: skip
    selector: int = option(
        "give P-EAGLE heads a selector of rank N, 256 as in trained heads; rows of the kind selector-step",
        default=0, type=positive, metavar="N",
    )  # fmt: skip
    synthetic_acceptance_length: float | None = option(
        "accept as many drafts as give A tokens per round on average, 1 to K+1; without it a head with random "
        "weights decides, whose drafts are hardly ever accepted",
        default=None, type=float, metavar="A",
    )  # fmt: skip
    synthetic_acceptance_rows: Path | None = option(
        "instead accept as many drafts as in rounds of real texts, from rows of headroom: each request draws from "
        "one text",
        default=None, type=Path, metavar="FILE.jsonl",
    )  # fmt: skip
    synthetic_acceptance_set: str = option(
        "set of the texts of those rows", default="own", metavar="SET"
    )
    adaptive: tuple[str, ...] = adaptive_option()
    rounds_per_call: int | None = rounds_per_call_option()
    prompt_tokens: int = option("tokens per prompt", default=512, type=positive, metavar="N")
    max_tokens: int = option("new tokens per prompt", default=512, type=positive, metavar="N")
    temperature: float = option(
        "temperature; 0: greedy, 1 spreads the tokens over many experts",
        default=1.0,
        type=float,
        metavar="T",
    )
    top_k: int = option(
        "top-k of all requests; 0: off. With it or --top-p sampled rounds are rows of the kind filtered-step",
        default=0, type=int, metavar="N",
    )  # fmt: skip
    top_p: float = option("top-p of all requests; 1: off", default=1.0, type=float, metavar="P")
    draft_sampling: str = option(
        "how the head chooses drafts", default="argmax", choices=("argmax", "sample")
    )
    dtype: str = dtype_option()
    kv_cache_dtype: str = option(
        "type of keys and values; auto: as --dtype", default="auto", choices=("auto", "fp8")
    )
    tensor_parallel: int = option(
        "devices that run every round together", default=1, type=positive, metavar="N"
    )
    gather: str = gather_option()
    replicas: int | None = option(
        "engines that run at the same time, each with devices of its own and an equal share of the requests; given 1, a "
        "row stands beside those of several devices", default=None, type=positive, metavar="N",
    )  # fmt: skip
    activations: str = option(
        "how fp8 weights read activations; fp8: quantised; mxfp8: quantised, and so are the weights",
        default="bf16",
        choices=("bf16", "fp8", "mxfp8"),
    )
    page_size: int = option("tokens per page", default=64, type=positive, metavar="N")
    prefill_chunk: int = option("tokens per prefill call", default=512, type=positive, metavar="N")
    prefill_rows: int = option("prompts per prefill call", default=8, type=positive, metavar="N")
    small_prefills: bool = option(
        "also compile smaller prefill programs, for calls with few tokens", default=False
    )
    jobs: int = jobs_option()
    prefills: int = option(
        "repeats of the prefill alone; the row has their median",
        default=3,
        type=positive,
        metavar="N",
    )
    seed: int = option("seed of weights and prompts", default=0, type=int, metavar="N")
    profile: str | None = option(
        "trace some rounds after timing and list their kernels; with DIR, keep the traces there",
        default=None, nargs="?", const="", metavar="DIR",
    )  # fmt: skip
    profile_rounds: int = option("rounds to trace", default=4, type=positive, metavar="N")
    cold_start: bool = option(
        "measure seconds from process start to first token instead of rounds, with an empty and a filled "
        "cache of compiled programs", default=False,
    )  # fmt: skip
    out: Path = rows_file("decode_step.jsonl")

    def prefill_rows_of(self, concurrency: int) -> int:
        """Rows of the largest prefill call of an engine for so many requests: no more, unless there are smaller calls."""
        return self.prefill_rows if self.small_prefills else min(self.prefill_rows, concurrency)

    @property
    def is_repeated(self) -> bool:
        """Whether a call runs several rounds because the command says so."""
        return (self.rounds_per_call or 1) > 1

    def check(self) -> None:
        check_num_drafts(self.k)
        check_preset(self.preset)
        if None not in (self.synthetic_acceptance_length, self.synthetic_acceptance_rows):
            raise ConfigError(
                "--synthetic-acceptance-length and --synthetic-acceptance-rows exclude each other"
            )
        if self.selector and (self.tensor_parallel > 1 or self.replicas or self.cold_start):
            raise ConfigError(
                "--selector is for rounds of one device: leave out --tensor-parallel, --replicas and --cold-start"
            )
        check_jobs(self)
        if self.is_repeated and (self.temperature > 0 or self.presence_penalty):
            raise ConfigError(
                "--rounds-per-call above 1 is for greedy rounds: set --temperature 0, and leave out "
                "--presence-penalty"
            )
        if uneven := [c for c in self.concurrency if c % (self.replicas or 1)]:
            raise ConfigError(
                f"--concurrency {uneven[0]}: {self.replicas} replicas cannot share it evenly"
            )


def row_drafts(row: dict) -> str:
    """K of a row, as printed."""
    if "chosen_num_draft" in row:
        return f"{row['chosen_num_draft']} of {row['num_speculative_tokens']}"
    return str(row["num_speculative_tokens"])


def run(options: Options) -> int:
    options = replace(options, concurrency=tuple(sorted(set(options.concurrency))))
    if options.cold_start:
        _cold_start(options)
    else:
        _decode_step(options)
    return 0


def _decode_step(options: Options) -> None:
    from bench.decode_step import decode_step
    from bench.side_by_side import side_by_side
    from peagle_jax.cli import runs

    if options.replicas:
        measured = side_by_side(options)
    else:
        measured = decode_step(options, options.environment())

    header = ["method", "K", "conc.", "ms/round", "tokens/s", "floor ms", "of floor", "prefill ms"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            row_drafts(row),
            str(row["concurrency"]),
            f"{row['ms_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            "" if row.get("floor_ms") is None else f"{row['floor_ms']:.2f}",
            "" if row.get("floor_ms") is None else f"{100 * row['fraction_of_floor']:.0f} %",
            f"{row['prefill_ms']:.0f}",
        ]
        for row in measured
    ]
    show(header, lines, options.out)


def _cold_start(options: Options) -> None:
    from bench.cold_start import cold_start
    from bench.decode_step import variants
    from peagle_jax.cli import runs

    header = ["method", "K", "cold s", "weights aside", "warm s", "weights aside"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            *(
                f"{seconds:.1f}"
                for key, part in (("seconds", "parts"), ("warm_seconds", "warm_parts"))
                for seconds in (row[key], row[key] - row[part]["weights"])
            ),
        ]
        for row in cold_start(options, [variant[:2] for variant in variants(options)])
    ]
    show(header, lines, options.out)


COMMAND = Command(
    name="decode-step",
    summary="milliseconds per round and prefill of full-size models, and their share of the floor",
    examples=(
        "decode-step --preset gpt-oss-20b --layers 4 --max-tokens 64 --profile",
        "decode-step --preset qwen3-coder-30b-a3b-fp8 --method none eagle3 peagle -K 3 7 \\\n      --synthetic-acceptance-length 3.1 --concurrency 1 8 32",
        "decode-step --preset qwen3-coder-30b-a3b-fp8 --method none peagle --adaptive off,load \\\n      --synthetic-acceptance-rows bench/results/headroom.jsonl --concurrency 8 32 128 256",
    ),
    description=f"""
Times rounds of the engine with a model of a released shape. Weights are random and made on the device, so no
checkpoint is needed; a large model needs a GPU. In a round the target checks the drafts and the head makes the
next ones. A cell is a method, a K (drafts per round) and a concurrency. Each cell adds a row: milliseconds per
round at a full batch (host included), tokens per second, prefill, peak memory, and the floor (the least time of a
round, from its bytes and operations). With --adaptive load the engine chooses K of each round, at most the given
one (docs/adaptive.md); the rows of such a comparison have the kind "adaptive-step". The first example below is
short. docs/decode-step.md explains the fields of a row.

Presets: {textwrap.fill(", ".join(PRESETS), 100, break_on_hyphens=False)};
with -fp8 at the end in FP8 blocks (all but GPT-OSS, which is MXFP4).
""",
    options=Options,
    run=run,
    removed={"--rows": "ragged rounds did not beat the best fixed K; leave it out"},
)
