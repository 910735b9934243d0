"""The commands of `peagle-bench`, one file each: options, run, table."""

import argparse

from bench.command import Command
from bench.commands import (
    ablations,
    acceptance,
    batch,
    choose_k,
    conversion,
    decode_step,
    headroom,
    hostile,
    humaneval,
    kernels,
    load_times,
    lossless,
    matrix,
    prefix_cache,
    prompt_ends,
    reliability,
    replicas,
    report,
    serve_load,
    sizes,
    structured,
    throughput,
    train_step,
)
from peagle_jax.cli.command_line import Parser

GROUPS: dict[str, tuple[Command, ...]] = {
    "Speed of a model and its heads": (
        acceptance.COMMAND, throughput.COMMAND, choose_k.COMMAND, prefix_cache.COMMAND,
        structured.COMMAND,
    ),
    "Full-size models without their weights, on a GPU": (
        decode_step.COMMAND, kernels.COMMAND, sizes.COMMAND, replicas.COMMAND, batch.COMMAND,
    ),
    "Quality of heads and models": (
        headroom.COMMAND, ablations.COMMAND, humaneval.COMMAND, prompt_ends.COMMAND,
        train_step.COMMAND,
    ),
    "Correctness": (lossless.COMMAND, reliability.COMMAND, matrix.COMMAND),
    "The server": (serve_load.COMMAND, hostile.COMMAND),
    "Weights on disk": (conversion.COMMAND, load_times.COMMAND),
    "Tables and plots": (report.COMMAND,),
}  # fmt: skip
COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}

_ABOUT = """\
Measures speed, acceptance and correctness. Every measurement appends a row (a JSON line with device, versions,
commit and command) to a file in bench/results; `report` draws tables and plots from the rows.

A round is one pass of the target, which checks the drafts, and one draft of the head. K is the number of drafts
per round, AL (acceptance length) the number of tokens per round, concurrency the number of requests at once. The
floor is the least time of a round: its bytes over the memory's bandwidth, or its operations over the peak.
docs/algorithm.md has a glossary. A first try, on any CPU:

  peagle-bench acceptance --sets HumanEval --num-prompts 4 -K 7 --max-tokens 64 --out /tmp/rows.jsonl
"""


def _overview() -> str:
    """Description of each command, with an example, by group."""
    lines = [_ABOUT]
    for title, commands in GROUPS.items():
        lines += [f"{title}:"]
        for command in commands:
            lines += [f"  {command.name:<12}  {command.summary}"]
            lines += [f"  {'':<12}    peagle-bench {command.examples[0]}"]
        lines += [""]
    return "\n".join([*lines, "peagle-bench COMMAND --help lists the options of a command."])


def parser() -> argparse.ArgumentParser:
    """The command line: the name of a command in `command`, and the values of its options."""
    made = Parser(
        prog="peagle-bench",
        usage="peagle-bench COMMAND [options]",
        description=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(
        dest="command", required=True, parser_class=Parser, metavar="COMMAND", help=argparse.SUPPRESS,
        prog="peagle-bench",
    )  # fmt: skip
    for command in COMMANDS.values():
        command.add_to(commands)
    return made
