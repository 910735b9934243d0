"""`peagle-bench prefix-cache`: its options, and the table of its rows."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, k_option, methods_option, option, positive, rows_file, show
from bench.commands.lossless import SubjectOptions


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions):
    methods: tuple[str, ...] = methods_option(("peagle",))
    k: tuple[int, ...] = k_option((7,))
    chats: int = option("chats, one after the other", default=16, type=positive)
    chat_tokens: int = option("tokens of the first turn", default=1536, type=positive, metavar="N")
    requests: int = option("requests with the same beginning", default=16, type=positive)
    shared_tokens: int = option(
        "tokens of the beginning that requests share", default=1536, type=positive, metavar="N"
    )  # fmt: skip
    turn_tokens: int = option(
        "tokens of the second turn, and of a request's own part", default=32, type=positive, metavar="N"
    )  # fmt: skip
    concurrency: int = option(
        "requests with the same beginning at once", default=8, type=positive, metavar="N"
    )
    max_tokens: int = option("new tokens per request", default=64, type=positive, metavar="N")
    page_size: int = option("tokens per page", default=16, type=positive, metavar="N")
    prefill_rows: int = option("prompts per prefill call", default=1, type=positive, metavar="N")
    out: Path = rows_file("prefix_cache.jsonl")


def run(options: Options) -> int:
    from bench.prefix_cache import prefix_cache
    from peagle_jax.cli import runs

    header = ["method", "K", "turn 2: TTFT ms, cold", "warm", "cached"]
    header += ["shared beginning: tokens/s, cold", "warm", "cached", "pages that differ"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            f"{row['turn_ttft_ms_cold']:.1f}",
            f"{row['turn_ttft_ms_warm']:.1f}",
            f"{row['turn_cached_share']:.0%}",
            f"{row['shared_tokens_per_second_cold']:.1f}",
            f"{row['shared_tokens_per_second_warm']:.1f}",
            f"{row['shared_cached_share']:.0%}",
            f"{row['pages_differing']} of {row['pages_compared']}",
        ]
        for row in prefix_cache(options, options.environment())
    ]
    show(header, lines, options.out)
    return 0


COMMAND = Command(
    name="prefix-cache",
    summary="time to first token and throughput of prompts that begin alike, cold and warm",
    examples=(
        "prefix-cache",
        "prefix-cache --preset qwen3-coder-30b-a3b-fp8 --chat-tokens 8192 --shared-tokens 4096 --requests 64 --concurrency 64",
    ),
    description="""
Two measurements on one engine, each with what the prefix cache has (warm) and without (cold).

Turn 2: a chat of --chat-tokens tokens with its answer, and then a second turn. The time to the first token of
the second turn, one chat at a time; median over the chats.

Shared beginning: --requests requests with the same first --shared-tokens tokens, as a system prompt, and a
part of their own, --concurrency at once. Tokens per second over all of them.

Pages: the keys and values of an output of --max-tokens tokens as rounds write them, as prefill writes them,
and, with --methods none,peagle, as plain decoding writes them. The row counts the pages whose bits differ.
""",
    options=Options,
    run=run,
)
