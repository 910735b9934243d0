"""The command line of `peagle-bench`: commands about a running service, and about what tests tried."""

import argparse
from pathlib import Path

from bench.arguments import RESULTS, add_rows, list_of_positive, positive

_SERVE_LOAD = """\
Loads a peagle-serve through peagle.v1.Generation and reports what clients saw. Without --address it
starts one on a free port; what follows -- are that server's options:

  peagle-bench serve-load --concurrency 1,8,32 -- --num-speculative-tokens 5
  peagle-bench serve-load --address 127.0.0.1:50051 --rate 4,8 --goodput ttft:500 tpot:50
  peagle-bench serve-load --concurrency 32 --overhead

--overhead sends the same prompts through the engine without the service too, in this process and in
turns with it: what the service costs on this machine, the clients' own work included.
"""


def _list_of_rates(text: str) -> list[float]:
    rates = sorted({float(item) for item in text.split(",")})
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: rates must be positive")
    return rates


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2e") or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2e:MS")
    return name, float(value)


def add_serve_load(commands) -> None:
    one = commands.add_parser(
        "serve-load",
        help="a gRPC service under load: latencies, goodput, statuses, overhead",
        description=_SERVE_LOAD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = one.add_argument
    add("--address", metavar="HOST:PORT", help="of a running server (default: start one)")
    kinds = one.add_mutually_exclusive_group()
    kinds.add_argument(
        "--concurrency", type=list_of_positive, default=[1, 8, 32], metavar="N,N",
        help="clients, each with one request after the other (default: 1,8,32)",
    )  # fmt: skip
    kinds.add_argument(
        "--rate", type=_list_of_rates, metavar="R,R", help="instead: Poisson arrivals per second"
    )
    add("--set", default="HumanEval", metavar="SET", help="as for acceptance, or random: ids")
    add("--num-requests", type=positive, metavar="N", help="of a cell (default: 4 per client)")
    add("--max-tokens", type=positive, default=128, metavar="N", help="new tokens per prompt")
    add("--prompt-tokens", type=positive, default=128, metavar="N", help="longest random prompt")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    add("--cancel-share", type=float, default=0.0, metavar="SHARE", help="of requests to cancel")
    add("--deadline-ms", type=positive, metavar="MS", help="of every request")
    add("--goodput", type=_limit, nargs="+", default=[], metavar="NAME:MS",
        help="limits: ttft:MS tpot:MS e2e:MS")  # fmt: skip
    add("--overhead", action="store_true", help="measure the bare engine beside the service")
    add("--repeats", type=positive, default=3, metavar="N", help="turns of --overhead (default: 3)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, prompts, cancellations")
    add_rows(one, "serve_load.jsonl")
    add("serve_options", nargs="*", metavar="-- OPTION", help="of peagle-serve")


_HOSTILE = """\
Attacks a peagle-serve that it starts (what follows -- are its options), one kind of hostile client
after the other and then all together, and reports what honest clients noticed. Exit code 1 when a
target is missed: right statuses, p99 of health within 100 ms, the p99 gap of a stream within 1.5 of
the quiet one, memory back within 200 MB, less than 1 MB of log a minute.

  peagle-bench hostile
  peagle-bench hostile --only "prompt ids" --only "silent" -- --max-num-seqs 4
"""


def add_hostile(commands) -> None:
    one = commands.add_parser(
        "hostile",
        help="a service under attack: health, latency, memory, log, statuses",
        description=_HOSTILE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = one.add_argument
    add(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="attacks whose name has it; repeatable",
    )
    add("--seconds", type=float, default=10.0, metavar="S", help="of an attack (default: 10)")
    add(
        "--hold",
        type=float,
        default=75.0,
        metavar="S",
        help="longest hold of a connection (default: 75)",
    )
    add("--quiet", type=float, default=5.0, metavar="S", help="watched before each (default: 5)")
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="share of the hostile requests to send",
    )
    add(
        "--descriptors",
        type=positive,
        default=300,
        metavar="N",
        help="that the server may open (default: 300)",
    )
    add(
        "--together",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="at the end, all at once",
    )
    add(
        "--repeats", type=int, default=2, metavar="N",
        help="times to measure again while other work delays the prober itself (default: 2)",
    )  # fmt: skip
    add_rows(one, "hostile.jsonl")
    add("serve_options", nargs="*", metavar="-- OPTION", help="of peagle-serve")


_RELIABILITY = """\
Runs the tests that try random cases, with more cases if asked, writes how many cases of each kind they
tried and with what result, and draws the tables of docs/reliability.md anew. Exit code 1 when a test
fails.

  peagle-bench reliability
  peagle-bench reliability --cases 100000 --only "safetensors"
"""


def add_reliability(commands) -> None:
    one = commands.add_parser(
        "reliability",
        help="randomised tests: how much they tried, with what result",
        description=_RELIABILITY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = one.add_argument
    add("--cases", type=positive, metavar="N", help="of each test (default: its own number)")
    add(
        "--only",
        action="append",
        default=[],
        metavar="KIND",
        help="kinds of cases whose name has it; repeatable",
    )
    add(
        "--page",
        type=Path,
        default=RESULTS.parents[1] / "docs" / "reliability.md",
        metavar="FILE",
        help="whose tables are drawn anew",
    )
    add("tests", nargs="*", metavar="TEST", help="files or tests (default: all)")
    add_rows(one, "reliability.jsonl")
