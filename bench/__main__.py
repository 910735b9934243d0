"""`peagle-bench`: measurements (sweeps, full-size rounds, service load) and tables of their rows."""

import logging
import os
import sys
from collections.abc import Sequence

from bench.checks import check
from bench.options import parser
from peagle_jax.config import ConfigError


def _environment(args) -> dict:
    """Fields shared by all rows of this command. Also enables the compilation cache."""
    from bench import rows
    from peagle_jax import runs

    environment = rows.environment(args.sha or os.environ.get("PEAGLE_SHA"))
    if not args.no_cache:
        runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    return environment


def _cold_start(args, variants: list[tuple[str, int]]) -> None:
    from bench.cold_start import cold_start
    from peagle_jax import runs

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
        for row in cold_start(args, variants)
    ]
    print(runs.table(header, lines))
    print(f"rows: {args.out}")


def _decode_step(args) -> None:
    from bench.decode_step import decode_step, variants
    from peagle_jax import runs

    args.concurrency = sorted(set(args.concurrency))
    if args.cold_start:
        _cold_start(args, variants(args))
        return
    environment = _environment(args)
    header = ["method", "K", "conc.", "ms/round", "tokens/s", "floor ms", "of floor", "prefill ms"]
    lines = [
        [
            runs.METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            str(row["concurrency"]),
            f"{row['ms_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
            "" if row["floor_ms"] is None else f"{100 * row['fraction_of_floor']:.0f} %",
            f"{row['prefill_ms']:.0f}",
        ]
        for row in decode_step(args, environment)
    ]
    print(runs.table(header, lines))
    print(f"rows: {args.out}")


def _lossless(args) -> int:
    from bench.lossless import lossless
    from peagle_jax import runs

    header = ["method", "K", "conc.", "texts", "equal", "tokens", "differ", "AL"]
    lines, differing = [], 0
    for row in lossless(args, _environment(args)):
        differing += row["tokens_differing"]
        counts = ("texts", "texts_equal", "tokens_compared", "tokens_differing")
        lines.append(
            [
                runs.METHOD_NAMES[row["method"]],
                str(row["num_speculative_tokens"]),
                str(row["concurrency"]),
                *(f"{row[name]:,}" for name in counts),
                f"{row['acceptance_length']:.2f}",
            ]
        )
    print(runs.table(header, lines))
    print(f"rows: {args.out}")
    return 1 if differing else _code(row["prompts_left_out"])


def _code(left_out: int) -> int:
    """Exit code of a run that skipped some prompts."""
    return 3 if left_out else 0


def _serve_load(args) -> int:
    from bench.serve_load import serve_load
    from peagle_jax import runs

    triple = lambda found: "/".join(f"{value:.0f}" for value in found.values()) if found else ""
    header = ["conc.", "per s", "requests", "tokens/s", "req/s", "goodput", "TTFT ms", "TPOT ms"]
    header += ["e2e ms", "AL", "overhead", "statuses"]
    args.goodput = dict(args.goodput)
    found = serve_load(args, _environment(args))
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
        for row in found
    ]
    print(runs.table(header, lines))
    print(f"latencies: p50/p90/p99; rows: {args.out}")
    return _code(sum(row["prompts_left_out"] for row in found))


def _hostile(args) -> int:
    from bench.hostile import hostile
    from peagle_jax import runs

    ms = lambda found: f"{found['p99']:.0f}/{found['max']:.0f}"
    header = ["attack", "requests", "wrong", "health", "gRPC health", "gap", "quiet gap", "late"]
    header += ["MB before/peak/after", "log MB/min", "files", "service s", "attackers s"]
    header += ["missed"]
    found = hostile(args, _environment(args))
    lines = [
        [
            row["attack"],
            f"{row['attempts']:,}",
            f"{row['wrong']:,}",
            ms(row["under_attack"]["health_ms"]),
            ms(row["under_attack"]["rpc_health_ms"]),
            ms(row["under_attack"]["gap_ms"]),
            ms(row["quiet"]["gap_ms"]),
            ms(row["under_attack"]["prober_late_ms"]),
            "/".join(f"{value:.0f}" for value in row["memory_mb"].values()),
            f"{row['log_mb_per_minute']:.2f}",
            "/".join(map(str, row["descriptors"].values())),
            f"{row['service_cpu_seconds']:.1f}",
            f"{row['attackers_cpu_seconds']:.1f}",
            " ".join(row["missed"]),
        ]
        for row in found
    ]
    print(runs.table(header, lines))
    print(f"milliseconds: p99/max; seconds: processor time; rows: {args.out}")
    return 1 if any(row["missed"] for row in found) else 0


def _reliability(args) -> int:
    from bench.reliability import reliability
    from peagle_jax import runs

    found = reliability(args, _environment(args))
    lines = [
        [
            row["tried"],
            f"{row['cases']:,}",
            str(row["tests"]),
            f"{row['seconds']:.1f}",
            " ".join(row["failed"]) or "passed",
        ]
        for row in found
    ]
    print(runs.table(["tried", "cases", "tests", "seconds", "result"], lines))
    print(f"rows: {args.out}")
    return 1 if any(row["failed"] for row in found) else 0


def _kernels(args) -> None:
    from bench.kernels import kernels
    from peagle_jax import runs

    environment = _environment(args)
    number = lambda value, form: "" if value is None else format(value, form)
    header = ["kernel", "us", "TB/s", "of limit", "XLA us", "speedup", "error"]
    lines = [
        [
            " ".join(filter(None, (row["op"], row["spec"], row["config"]))),
            number(row["us"], ".2f"),
            number(row["bytes_per_second"] / 1e12, ".2f"),
            number(row["fraction_of_bandwidth"], ".0%"),
            number(row["reference_us"], ".2f"),
            number(row["speedup"], ".2f"),
            number(row["max_relative_error"], ".1e"),
        ]
        for row in kernels(args, environment)
    ]
    print(runs.table(header, lines))
    print(f"rows: {args.out}")


def _ladder(args) -> int:
    from bench import ladder_page
    from bench.ladder import ladder
    from peagle_jax import runs

    found = list(ladder(args))
    print(runs.table(ladder_page.HEADER, ladder_page.lines(found)))
    print(f"rows: {args.out}")
    return 1 if any(row["error"] for row in found) else 0


def _sweep(args) -> int:
    from bench.acceptance import acceptance
    from bench.throughput import throughput
    from peagle_jax import runs

    environment = _environment(args)
    measure = acceptance if args.command == "acceptance" else throughput
    header = ["set", "method", "K", "conc.", "tokens/s", "x plain", "ms/round", "TTFT ms", "AL"]
    found = measure(args, environment)
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
        for row in found
    ]
    print(runs.table(header, lines))
    print(f"rows: {args.out}")
    return _code(sum(row["prompts_left_out"] for row in found))


def _heads(args) -> None:
    from bench import ablations, headroom

    environment = _environment(args)
    if args.command == "headroom":
        print(headroom.table(headroom.headroom(args, environment)))
    else:
        print(ablations.table(ablations.ablations(args, environment)))
    print(f"rows: {args.out}")


def _report(args) -> None:
    from bench import report
    from bench.arguments import RESULTS

    pages = args.pages
    if pages is None:
        pages = report.PAGES if args.results.resolve() == RESULTS.resolve() else ()
    print(*report.report(args.results, pages, args.plots or args.results), sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        check(args)
        if args.command == "conversion":
            from bench.conversion import conversion

            print(*(f"{name}: {value}" for name, value in conversion(args).items()), sep="\n")
        elif args.command == "kernels" and args.ladder:
            return _ladder(args)
        elif args.command == "kernels":
            _kernels(args)
        elif args.command == "sizes":
            from bench.sizes import table

            print(table())
        elif args.command in ("headroom", "ablations"):
            _heads(args)
        elif args.command == "decode-step":
            _decode_step(args)
        elif args.command == "lossless":
            return _lossless(args)
        elif args.command == "serve-load":
            return _serve_load(args)
        elif args.command == "hostile":
            return _hostile(args)
        elif args.command == "reliability":
            return _reliability(args)
        elif args.command == "report":
            _report(args)
        else:
            return _sweep(args)
    except ConfigError as error:
        print("peagle-bench: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the rows so far are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
