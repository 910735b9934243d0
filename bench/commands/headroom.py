"""`peagle-bench headroom`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    SweepOptions,
    chat_option,
    k_option,
    methods_option,
    option,
    positive,
    rows_file,
)
from bench.commands.acceptance import SETS_HELP


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    methods: tuple[str, ...] = methods_option(("eagle3", "peagle"))
    k: tuple[int, ...] = k_option((7,))
    sets: tuple[str, ...] = option(SETS_HELP, default=("HumanEval",), nargs="+", metavar="SET")
    num_prompts: int | None = option(
        "prompts per set; all without it", default=None, type=positive, metavar="N"
    )
    chat: bool | None = chat_option()
    texts: Path | None = option(
        "folder that keeps the greedy texts; texts found there are not decoded again", default=None,
        type=Path, metavar="DIR",
    )  # fmt: skip
    concurrency: int = option("texts decoded at once", default=16, type=positive, metavar="N")
    out: Path = rows_file("headroom.jsonl")
    temperature: float = 0.0  # no option: texts are greedy


def run(options: Options) -> int:
    from bench import headroom

    print(headroom.table(headroom.headroom(options, options.environment())))
    print(f"rows: {options.out}")
    return 0


COMMAND = Command(
    name="headroom",
    summary="how good a head could become: its AL on text that does not repeat, and upper bounds of its AL",
    examples=("headroom --sets HumanEval own=peagle_jax --texts run/greedy",),
    description="""
Runs target and head once over greedy texts and simulates the engine's rounds on the result. A row has

- the acceptance length (AL, tokens per round) of all rounds;
- the fresh AL, of rounds whose last 8 tokens did not occur earlier in the text;
- the recall: how often the target's token is among the head's top 1, 2, 4, 8 and 16;
- the AL of an oracle that always chooses the target's token if it is among them;
- the calibration: the head's probability of its draft beside the share of drafts that are right;
- the AL with n-gram drafts, which are copied from an earlier occurrence in the text.
""",
    options=Options,
    run=run,
)
