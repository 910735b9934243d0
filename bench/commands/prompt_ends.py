"""`peagle-bench prompt-ends`: its options, and the table of its rows."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    SweepOptions,
    k_option,
    methods_option,
    option,
    positive,
    rows_file,
    show,
)

ENDS = {
    "end of a line": r"\S(?=\n)",
    "newline": r"\S\n",
    "space": r"\S (?=\S)",
    "inside a word": r"\w(?=\w)",
    "random character": r"(?s:.)",
}
"""Where a prompt ends -> pattern; the prompt is cut after a match."""


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    methods: tuple[str, ...] = methods_option(("peagle",))
    k: tuple[int, ...] = k_option((7,))
    source: str = option(
        "text file, or folder whose *.py files are read", default="peagle_jax", metavar="PATH"
    )
    num_prompts: int = option("prompts of each end", default=400, type=positive, metavar="N")
    characters: int = option("length of a prompt", default=600, type=positive, metavar="N")
    concurrency: int = option("requests at once", default=16, type=positive, metavar="N")
    max_tokens: int = option("new tokens of an answer", default=8, type=positive, metavar="N")
    heal: bool = option(
        "leave out the prompt's last token and let the answer begin with its text", default=False
    )
    seed: int = option("seed of the places", default=0, type=int, metavar="N")
    out: Path = rows_file("prompt_ends.jsonl")


def run(options: Options) -> int:
    from bench.prompt_ends import prompt_ends

    done = prompt_ends(options, options.environment())
    lines = [[row["end"], str(row["prompts"]), f"{row['empty']:.1%}"] for row in done]
    show(["prompt ends", "prompts", "empty answers"], lines, options.out)
    return 0


COMMAND = Command(
    name="prompt-ends",
    summary="share of empty answers by where the prompt was cut: after a newline, inside a word",
    examples=("prompt-ends --source peagle_jax",),
    description="""
Cuts prompts from source text at random places of five kinds and lets the model continue them. An answer is empty if
it has no character but spaces and newlines. A tokenizer merges characters across such a place, so the prompt's last
token may be one that training text never has there.
""",
    options=Options,
    run=run,
)
