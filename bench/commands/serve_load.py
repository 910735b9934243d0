"""`peagle-bench serve-load`: its options, and the table of its rows."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    RowOptions,
    check_preset,
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


def _protocols(text: str) -> tuple[str, ...]:
    if unknown := set(names := text.split(",")) - {"grpc", "http"}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} must be grpc or http")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    address: str | None = option(
        "address of a running server; without it one is started", default=None, metavar="HOST:PORT"
    )
    preset: str | None = option(
        "start a server of this full-size model with random weights, and measure the bare engine after it; rows of the "
        "kind served", default=None, metavar="NAME",
    )  # fmt: skip
    layers: int | None = option(
        "the first N layers of the preset only", default=None, type=positive, metavar="N"
    )
    synthetic_acceptance_length: float | None = option(
        "accept as many drafts of the preset's head as give A tokens per round on average", default=None, type=float,
        metavar="A",
    )  # fmt: skip
    no_bare: bool = option("leave out the bare engine beside a preset", default=False)
    lock_shares: bool = option(
        "record which share of the time each process of a preset's server holds the interpreter's lock (needs py-spy, "
        "and slows the server a little)", default=False,
    )  # fmt: skip
    protocols: tuple[str, ...] = option(
        "how clients call the server, one row each: grpc, http (streams of /v1/completions)", default=("grpc",),
        type=_protocols, metavar="P,P",
    )  # fmt: skip
    client_processes: int = option(
        "most client processes; never more than clients", default=6, type=positive, metavar="N"
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
    duration: int | None = option(
        "load a preset for N seconds at each concurrency instead, with prompts and outputs of mixed lengths, at least a "
        "quarter of --prompt-tokens and --max-tokens", default=None, type=positive, metavar="N",
    )  # fmt: skip
    max_tokens: int = option("new tokens per prompt", default=128, type=positive, metavar="N")
    prompt_tokens: int = option(
        "tokens of the longest random prompt; of each one beside --preset",
        default=128,
        type=positive,
        metavar="N",
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
    seed: int = option(
        "seed of arrivals, prompts and cancellations", default=0, type=int, metavar="N"
    )
    serve_options: tuple[str, ...] = option(
        "options of peagle-serve", default=(), positional=True, nargs="*", metavar="-- OPTION"
    )
    out: Path = rows_file("serve_load.jsonl")

    def check(self) -> None:
        if self.preset is not None:
            check_preset(self.preset)

    def environment(self) -> dict:
        """See `RowOptions`; beside a preset this process must not use the device, whose memory the server holds."""
        if self.preset is None:
            return super().environment()
        from bench import rows
        from bench.bare_engine import in_child

        return in_child(rows.environment, self.commit)

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds by name of a latency, for goodput."""
        return dict(self.goodput)


def run(options: Options) -> int:
    from bench.serve_load import serve_load

    triple = lambda found: "/".join(f"{value:.0f}" for value in found.values()) if found else ""
    header = [
        "protocol",
        "conc.",
        "per s",
        "requests",
        "tokens/s",
        "req/s",
        "goodput",
        "TTFT ms",
        "TPOT ms",
    ]
    header += ["e2e ms", "longest gap ms", "AL", "of bare", "statuses"]
    done = serve_load(options, options.environment())
    lines = [
        [
            row["protocol"],
            str(row["concurrency"] or ""),
            f"{row['rate']:g}" if row["rate"] else "",
            str(row["requests"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['requests_per_second']:.2f}",
            f"{row['goodput']:.2f}" if "goodput" in row else "",
            *(triple(row[f"{name}_ms"]) for name in ("ttft", "tpot", "e2e")),
            f"{row['gap_ms']['max']:.0f}" if row.get("gap_ms") else "",
            f"{row['acceptance_length']:.2f}",
            f"{row['served_over_bare']:.2f}" if "served_over_bare" in row else "",
            " ".join(f"{code}:{count}" for code, count in row["codes"].items()),
        ]
        for row in done
    ]
    show(header, lines, options.out, note="latencies: p50/p90/p99; ")
    return 0


COMMAND = Command(
    name="serve-load",
    summary="load on a server: latencies, goodput, statuses, gaps; a preset beside the bare engine",
    examples=(
        "serve-load --concurrency 1,8,32 -- --num-speculative-tokens 5",
        "serve-load --address 127.0.0.1:50051 --rate 4,8 --goodput ttft:500 tpot:50",
        "serve-load --preset qwen3-coder-30b-a3b-fp8 --synthetic-acceptance-length 3.1 --concurrency 1,8,32,128 "
        "--protocols grpc,http --prompt-tokens 512 --max-tokens 256 --temperature 1",
    ),
    description="""
Sends requests to a peagle-serve (gRPC, peagle.v1.Generation, or HTTP) from several client processes and reports what clients see: latencies as
p50/p90/p99, tokens and requests per second, goodput (requests per second within the limits of --goodput) and
statuses. Without --address a server is started on a free port; options after -- are that server's. It has no
prefix cache, because prompts repeat; -- --prefix-caching turns it on, and prefix-cache measures it.

--preset starts a server of a full-size model with random weights and made-up tokens, and sends it random prompts of
--prompt-tokens tokens by each of --protocols. After the server has ended, an engine in a process of its own gets the same
requests in the same order and at the same concurrency or times. Rows also hold the seconds of the start, the gaps between
messages, and memory and processor time of each process of the server.
""",
    options=Options,
    run=run,
    removed={
        "--overhead": "use --preset, whose rows have the bare engine's tokens per second too",
        "--repeats": "it was for --overhead; leave it out",
    },
)
