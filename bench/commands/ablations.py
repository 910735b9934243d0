"""`peagle-bench ablations`: its options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, RowOptions, dtype_option, option, positive, rows_file


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    model: str | None = option(
        "Hugging Face folder of the target; the embedded model without it", default=None,
        metavar="DIR",
    )  # fmt: skip
    text: Path = option(
        "folder of training texts, written by peagle-train continuations", type=Path, metavar="DIR"
    )
    texts: Path = option(
        "folder of texts to measure on, written by peagle-bench headroom --texts", type=Path, metavar="DIR"
    )  # fmt: skip
    runs: Path = option("folder for checkpoints of the training runs", type=Path, metavar="DIR")
    cells: tuple[str, ...] = option(
        "names of cells to train; an unknown name lists all", nargs="+", metavar="CELL"
    )
    steps: int = option("training steps", default=2500, type=positive, metavar="N")
    batch: int = option("texts per step", default=64, type=positive, metavar="N")
    learning_rate: float = option("peak learning rate", default=3e-3, type=float, metavar="X")
    seed: int = option("seed of the training", default=0, type=int, metavar="N")
    num_draft: int = option("drafts per round", default=7, short="-K", type=positive, metavar="K")
    dtype: str = dtype_option()
    train_options: tuple[str, ...] = option(
        "last option: the rest of the line is passed to every peagle-train drafter", default=(),
        nargs=argparse.REMAINDER, metavar="OPTION",
    )  # fmt: skip
    out: Path = rows_file("ablations.jsonl")


def run(options: Options) -> int:
    from bench import ablations

    print(ablations.table(ablations.ablations(options, options.environment())))
    print(f"rows: {options.out}")
    return 0


COMMAND = Command(
    name="ablations",
    summary="heads that differ in one training option, compared on the same texts",
    examples=(
        "ablations --text run/text --texts run/greedy --runs run/cells --cells mixed mixed-repeats",
    ),
    description="""
Trains a head for every cell (a named set of peagle-train options) and measures it on stored texts. Cells that
have a row are skipped, and a killed run resumes, so repeating the command completes the table. "Comparing
options" in docs/training.md has the whole procedure.
""",
    options=Options,
    run=run,
)
