"""`peagle-bench choose-k`: its options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import RESULTS, Command, Options, option


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(","))
    if not all(1 >= a >= b >= 0 for a, b in zip(rates, (*rates[1:], 0.0), strict=True)):
        raise argparse.ArgumentTypeError(f"{text} must be shares between 0 and 1 that never rise")
    return rates


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return share


@dataclass(frozen=True, kw_only=True)
class ChooseOptions(Options):
    rows: tuple[Path, ...] = option(
        "files with rows of decode-step, throughput and acceptance",
        default=(RESULTS / "h200.jsonl",), type=Path, nargs="+", metavar="FILE.jsonl",
    )  # fmt: skip
    times: Path | None = option(
        "file of round times that an engine with --adaptive load keeps, in round-times/ of its cache; its "
        "times instead of those of the rows",
        default=None, type=Path, metavar="FILE.json",
    )  # fmt: skip
    model: str = option("name of the model in the rows", default="embedded", metavar="NAME")
    method: str = option("method that drafts", default="peagle", choices=("peagle", "eagle3"))
    acceptance: tuple[float, ...] | None = option(
        "share of rounds in which draft 1, 2, ... becomes output; from the rows without it",
        default=None, type=_rates, metavar="A,A",
    )  # fmt: skip
    least_gain: float = option(
        "share of tokens per second by which a larger K must be faster to be chosen", default=0.03, type=_share,
        metavar="X",
    )  # fmt: skip


def run(options: ChooseOptions) -> int:
    from bench import choose_k, rows

    measured = rows.read(options.rows)
    about = options.model, options.method
    if options.times is None:
        times = choose_k.times_of(measured, *about)
    else:
        times = choose_k.stored_times(options.times)
    acceptance = options.acceptance or choose_k.acceptance_of(measured, *about)
    choice = choose_k.choose(times, acceptance, least_gain=options.least_gain)
    print(choose_k.table(choice))
    print(choose_k.option_text(choice))
    return 0


COMMAND = Command(
    name="choose-k",
    summary="K with the most tokens per second for each batch size, from measured rows",
    examples=(
        "choose-k --model embedded",
        "choose-k --acceptance 0.85,0.7,0.55,0.4",
        "choose-k --times ~/.cache/peagle-jax/round-times/NAME.json",
    ),
    description="""
Computes tokens per second by concurrency and K (drafts per round) from measured rows: the time of a round and
the acceptance of each drafted position. Prints the table, and the option of peagle-serve with the best K of each
concurrency, --num-speculative-tokens-per-batch-size (docs/adaptive.md). Nothing is measured. The time for K = 0
is that of plain decoding; a server with a head takes a little longer, because the head still runs over one row.
With --times the table is the one from which the engine chooses K by load, for the acceptance of the rows or of
--acceptance; a concurrency is then a batch bucket.
""",
    options=ChooseOptions,
    run=run,
)
