"""`peagle-bench serve-load`: its options, and the table of its rows."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    RowOptions,
    exit_code,
    list_of_positive,
    option,
    positive,
    rows_file,
    show,
)
from bench.commands.acceptance import SETS_HELP


def _list_of_rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted({float(item) for item in text.split(",")}))
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be positive")
    return rates


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2e") or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2e:MS")
    return name, float(value)


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    address: str | None = option(
        "address of a running server; without it one is started", default=None, metavar="HOST:PORT"
    )
    concurrency: tuple[int, ...] = option(
        "numbers of clients, each with one request after the other", default=(1, 8, 32), excludes="load",
        type=list_of_positive, metavar="N,N",
    )  # fmt: skip
    rate: tuple[float, ...] = option(
        "requests per second that arrive at random (Poisson), instead of --concurrency", default=(), excludes="load", type=_list_of_rates,
        metavar="R,R",
    )  # fmt: skip
    set: str = option(f"{SETS_HELP}, or random (token ids)", default="HumanEval", metavar="SET")
    num_requests: int | None = option(
        "requests at each concurrency or rate; four per client without it",
        default=None,
        type=positive,
        metavar="N",
    )
    max_tokens: int = option("new tokens per prompt", default=128, type=positive, metavar="N")
    prompt_tokens: int = option(
        "tokens of the longest random prompt", default=128, type=positive, metavar="N"
    )
    temperature: float = option("temperature; 0: greedy", default=0.0, type=float, metavar="T")
    ignore_eos: bool = option("go on after the end-of-text token", default=False)
    cancel_share: float = option(
        "share of requests to cancel", default=0.0, type=float, metavar="SHARE"
    )
    deadline_ms: int | None = option(
        "deadline of every request", default=None, type=positive, metavar="MS"
    )
    constrained: float = option(
        "share of requests with a JSON schema, half of them with a tool too; needs a --reply-format that has calls",
        default=0.0, type=float, metavar="SHARE",
    )  # fmt: skip
    goodput: tuple[tuple[str, float], ...] = option(
        "also count requests within these limits: ttft:MS (time to first token), tpot:MS (time per output token), "
        "e2e:MS (whole request)", default=(), nargs="+", type=_limit, metavar="NAME:MS",
    )  # fmt: skip
    overhead: bool = option("also measure the engine without the service", default=False)
    repeats: int = option(
        "measurements of each of the two with --overhead; rows have medians", default=3, type=positive,
        metavar="N",
    )  # fmt: skip
    seed: int = option(
        "seed of arrivals, prompts and cancellations", default=0, type=int, metavar="N"
    )
    serve_options: tuple[str, ...] = option(
        "options of peagle-serve", default=(), positional=True, nargs="*", metavar="-- OPTION"
    )
    out: Path = rows_file("serve_load.jsonl")

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds by name of a latency, for goodput."""
        return dict(self.goodput)


def run(options: Options) -> int:
    from bench.serve_load import serve_load

    triple = lambda found: "/".join(f"{value:.0f}" for value in found.values()) if found else ""
    header = ["conc.", "per s", "requests", "tokens/s", "req/s", "goodput", "TTFT ms", "TPOT ms"]
    header += ["e2e ms", "AL", "overhead", "statuses"]
    done = serve_load(options, options.environment())
    lines = [
        [
            str(row["concurrency"] or ""),
            f"{row['rate']:g}" if row["rate"] else "",
            str(row["requests"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['requests_per_second']:.2f}",
            f"{row['goodput']:.2f}" if "goodput" in row else "",
            *(triple(row[f"{name}_ms"]) for name in ("ttft", "tpot", "e2e")),
            f"{row['acceptance_length']:.2f}",
            f"{row['overhead_percent']:.1f} %" if "overhead_percent" in row else "",
            " ".join(f"{code}:{count}" for code, count in row["codes"].items()),
        ]
        for row in done
    ]
    show(header, lines, options.out, note="latencies: p50/p90/p99; ")
    return exit_code(sum(row["prompts_left_out"] for row in done))


COMMAND = Command(
    name="serve-load",
    summary="load on a gRPC server: latencies, goodput, statuses, overhead over the bare engine",
    examples=(
        "serve-load --concurrency 1,8,32 -- --num-speculative-tokens 5",
        "serve-load --address 127.0.0.1:50051 --rate 4,8 --goodput ttft:500 tpot:50",
        "serve-load --concurrency 32 --overhead",
    ),
    description="""
Sends requests to a peagle-serve (gRPC, peagle.v1.Generation) and reports what clients see: latencies as
p50/p90/p99, tokens and requests per second, goodput (requests per second within the limits of --goodput) and
statuses. Without --address a server is started on a free port; options after -- are that server's. It has no
prefix cache, because prompts repeat; -- --prefix-caching turns it on, and prefix-cache measures it.

--overhead also sends the same prompts through an engine in this process, in turns with the service. The
difference is the cost of the service on this machine, including the work of the clients.
""",
    options=Options,
    run=run,
)
