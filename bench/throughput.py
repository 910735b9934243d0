"""`peagle-bench throughput`: tokens per second of the three methods, over concurrency and K."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from bench import rows
from bench.cells import Variant, cells_config
from bench.command import REMOVED, RESULTS, CellOptions, Command, SweepOptions, exit_code
from bench.models import Models
from bench.printed import show
from bench.sweep import check_rounds, engines, prompts_of, sampling
from bench.timing import Measurement, drive
from peagle_jax.cli import runs
from peagle_jax.engine.engine import Engine

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options(CellOptions, SweepOptions):
    """Options of this command.

    Args:
      set: prompts: HumanEval, MT-Bench, or NAME=FILE (JSON lines, a text file, a folder of *.py)
      min_prompts: least prompts of a cell; it has two for each concurrent request
    """

    set: str = "HumanEval"
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    min_prompts: int = 4
    out: Path = RESULTS / "throughput.jsonl"

    def num_prompts(self, concurrency: int) -> int:
        """A multiple of the concurrency, so that the batch stays full until near the end."""
        return max(self.min_prompts, 2 * concurrency)


def run(options: Options) -> int:
    """Measures, a row each, and prints them."""
    environment, models = options.environment(), Models.load(options)
    prompts = len(models.variants(options)) * sum(map(options.num_prompts, options.concurrency))
    done = []
    with tqdm(total=prompts, unit="prompt", disable=None) as bar:
        for row in _measured(models, options, environment, bar):
            check_rounds(row)
            done.append(rows.rounded(row))
            rows.append(options.out, done[-1])
    show("sweep", done, options.out)
    return exit_code(sum(row["prompts_left_out"] for row in done))


def _measured(models: Models, options: Options, environment: dict, bar: tqdm) -> Iterator[dict]:
    """A row of each cell."""
    config = runs.with_prefill_sizes(
        cells_config(
            options.concurrency,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
            programs_folder=options.programs_folder,
        )
    )
    name, pool, left_out = prompts_of(models, options, options.set, config)
    plain: dict[int, Measurement] = {}
    for variant, engine in engines(models, options, config):
        for concurrency in options.concurrency:
            bar.set_description(f"{variant} x{concurrency}")
            one = _run(engine, pool, concurrency, options, bar)
            if variant.method == "none":
                plain[concurrency] = one
            yield {
                "kind": "throughput" if options.adaptive == ("off",) else "adaptive",
                **models.identity(options, prompts=name, variant=variant, concurrency=concurrency),
                **_figures(engine, variant, one, plain.get(concurrency)),
                "prompts_left_out": left_out,
                **environment,
            }


def _run(
    engine: Engine, pool: list[list[int]], concurrency: int, options: Options, bar: tqdm
) -> Measurement:
    """One cell, after a warm-up."""
    prompts = list(itertools.islice(itertools.cycle(pool), options.num_prompts(concurrency)))
    params = sampling(options)
    if engine.policy is None:
        # The first rounds of a batch size pay for what later ones find in place.
        short = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
        drive(engine, prompts[:concurrency], short, concurrency=concurrency)
    else:  # a choice by load needs as much text as a run before it has settled
        drive(engine, prompts, params, concurrency=concurrency)
    return drive(engine, prompts, params, concurrency=concurrency, on_finished=bar.update)


def _figures(engine: Engine, variant: Variant, one: Measurement, plain: Measurement | None) -> dict:
    """Row fields of a measurement, beside the plain one of the same concurrency."""
    config = engine.config
    sizes = ("max_model_len", "prefill_rows", "prefill_chunk", "small_prefills", "long_prefills")
    row = one.as_row() | {
        "rounds_per_call": config.repeat,
        "engine": {name: getattr(config, name) for name in sizes},
    }
    if variant.adaptive != "off":
        chosen = engine.scheduler.num_draft_at
        row |= {
            "adaptive": variant.adaptive,
            "drafts_by_batch_size": {n: chosen(n) for n in config.batch_buckets},
        }
    if plain is not None:
        pairs = zip(plain.outputs, one.outputs, strict=True)
        row |= {
            "ratio_to_plain": row["tokens_per_second"] / plain.as_row()["tokens_per_second"],
            "outputs_equal_to_plain": sum(a == b for a, b in pairs),
        }
    return row


COMMAND = Command(
    examples=(
        "throughput --concurrency 1,8,32 -K 7",
        "throughput --methods none,peagle -K 7 --adaptive off,load",
    ),
    description="""
Decodes the same prompts in every cell (a method, a K and a concurrency), one cell after the other,
in one process. The batch buckets are the concurrencies. K is the number of drafts per round. A row
has tokens per second, milliseconds per round, time to first token (TTFT) and the ratio to plain
decoding. With --adaptive load the engine chooses K of each round, at most the given one
(docs/adaptive.md); the rows of such a comparison have the kind "adaptive".
""",
    options=Options,
    run=run,
    removed=REMOVED
    | dict.fromkeys(
        ("prefill-chunk", "prefill-rows", "small-prefills", "rounds-per-call"),
        "rows have the engine's own value; leave it out",
    )
    | dict.fromkeys(
        ("repeats", "prompts-per-slot"), "no row had another value than the default; leave it out"
    )
    | {"jobs": "programs compile side by side by themselves; leave it out"},
)
