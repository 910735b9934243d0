"""`peagle-bench kernels`: its options, and the table of its rows."""

import os
from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowOptions, option, positive, rows_file, show


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    op: tuple[str, ...] = option(
        "operation, a folder of pallas_kernels; repeatable, all without it",
        default=(),
        action="append",
        metavar="NAME",
    )
    spec: tuple[str, ...] = option(
        "spec, a named shape in the operation's specs.py; repeatable, all without it", default=(),
        action="append", metavar="NAME",
    )  # fmt: skip
    configs: bool = option(
        "also time the tuning configs that the kernel does not choose", default=False
    )
    jobs: int = option(
        "processes that compile side by side; each takes 2 to 4 GB of memory of the host. One spec is measured at a time",
        default=1, type=positive, metavar="N",
    )  # fmt: skip
    ladder: bool = option("time the steps of docs/ladder.md instead", default=False)
    out: Path = rows_file("kernels.jsonl")


def run(options: Options) -> int:
    return _ladder(options) if options.ladder else _kernels(options)


def _ladder(options: Options) -> int:
    from bench import ladder_page
    from bench.ladder import ladder

    done = list(ladder(options))
    show(ladder_page.HEADER, ladder_page.lines(done), options.out)
    return 1 if any(row["error"] for row in done) else 0


def _kernels(options: Options) -> int:
    from bench.kernels import kernels
    from peagle_jax.engine.device.compilation import CHILD_ENVIRONMENT

    if options.jobs > 1:  # this process needs no memory of the GPU either
        os.environ.update(CHILD_ENVIRONMENT)

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
        for row in kernels(options, options.environment())
    ]
    show(header, lines, options.out)
    return 0


COMMAND = Command(
    name="kernels",
    summary="each GPU kernel beside its XLA reference: microseconds, bandwidth, error",
    examples=(
        "kernels --op moe --spec qwen3-moe-gate-up-256",
        "kernels --jobs 15 --op quantize",
        "kernels --ladder",
    ),
    description="""
Times every operation of pallas_kernels on the shapes of real models (its specs), with arguments that come from
device memory and not from the L2 cache, and compares results with the jnp reference, compiled by XLA. Needs a
Hopper or Blackwell GPU.

--ladder times the steps of docs/ladder.md, each beside its prediction, and needs a Hopper GPU. Exit code 1
if a step fails or is wrong.
""",
    options=Options,
    run=run,
)
