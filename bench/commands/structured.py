"""`peagle-bench structured`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import (
    Command,
    ModelOptions,
    k_option,
    list_of_positive,
    methods_option,
    option,
    positive,
    rows_file,
    show,
)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    methods: tuple[str, ...] = methods_option(("peagle",))
    k: tuple[int, ...] = k_option((7,))
    concurrency: tuple[int, ...] = option(
        "requests at once", default=(1, 4, 8), type=list_of_positive, metavar="N,N"
    )
    repeats: int = option(
        "times that each schema is written", default=2, type=positive, metavar="N"
    )
    samples: int | None = option(
        "count the texts that --max-tokens ends instead: N of each of three schemas, at temperature 0 and 1",
        default=None,
        type=positive,
        metavar="N",
    )
    max_model_len: int = option(
        "most tokens of a prompt and its output together", default=512, type=positive, metavar="N"
    )
    out: Path = rows_file("structured.jsonl")


def run(options: Options) -> int:
    from bench import structured

    if options.samples:
        show(*structured.ends_table(structured.ends(options, options.environment())), options.out)
        return 0
    rows = structured.structured(options, options.environment())
    show(*structured.table(rows), options.out)
    return 0


COMMAND = Command(
    name="structured",
    summary="what JSON schemas cost a round, and whether forced tokens help as drafts",
    examples=(
        "structured --concurrency 1,8",
        "structured --methods none,peagle -K 3,7",
        "structured --samples 100 --max-tokens 256",
    ),
    description="""
Writes texts of six JSON schemas greedily. A row belongs to a batch size and a mode: "free" has no constraint,
"masks" has the constraint without forced drafts, "forced" is what the server does. It has the time of a round, the
acceptance length (AL), and the time of the masks of a round on the host. A constrained batch has no overlap of
host and device, so its round also pays for the turn of the host.
""",
    options=Options,
    run=run,
)
