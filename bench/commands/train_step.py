"""`peagle-bench train-step`: its options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowOptions, dtype_option, option, positive, rows_file, show

FORMS = {
    "anchors": "--method peagle --elements anchors",
    "texts": "--method peagle --elements texts",
    "picked": "--method peagle --elements texts --anchors {half}",
    "eagle3": "--method eagle3",
    "eagle3-picked": "--method eagle3 --anchors {half}",
}
"""Options of `peagle-train drafter`; `half` is half the tokens of a text."""


def _shape(text: str) -> str:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form TEXTSxTOKENS, as 64x512")
    return text


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    model: str | None = option(
        "Hugging Face folder of the target; the embedded model without it", default=None,
        metavar="DIR",
    )  # fmt: skip
    forms: tuple[str, ...] = option(
        "forms of the step", default=tuple(FORMS), choices=tuple(FORMS), nargs="+"
    )
    shapes: tuple[str, ...] = option(
        "texts a step, and tokens a text", default=("64x512", "8x4096", "1x20480"), nargs="+",
        type=_shape, metavar="TEXTSxTOKENS",
    )  # fmt: skip
    steps: int = option("timed steps", default=10, type=positive, metavar="N")
    jobs: int = option("programs compiled at a time", default=4, type=positive, metavar="N")
    dtype: str = dtype_option()
    train_options: tuple[str, ...] = option(
        "last option: the rest of the line is passed to every peagle-train drafter", default=(),
        nargs=argparse.REMAINDER, metavar="OPTION",
    )  # fmt: skip
    out: Path = rows_file("train_step.jsonl")


def run(options: Options) -> int:
    from bench import train_step

    found = train_step.train_step(options, options.environment())
    show(train_step.HEADER, train_step.lines(found), options.out)
    return 0


COMMAND = Command(
    name="train-step",
    summary="time and memory of one training step of a draft head, by length of the texts",
    examples=("train-step --shapes 64x512 8x4096 1x20480 --forms texts picked eagle3",),
    description="""
Times the step of `peagle-train drafter` on random texts: forward and backward pass of the head, the target's pass, and the
optimiser. A form names how the elements of a text are chosen. Memory is that of the compiled step by XLA's account.
A step that does not fit or does not compile is reported and left out.
""",
    options=Options,
    run=run,
)
