"""`peagle-bench throughput`: tokens per second of the three methods, over concurrency and K."""

import gc
import itertools
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from tqdm import tqdm

from bench import roofline, rows
from bench.cells import Variant, Work, cells_config, compile_all
from bench.command import RESULTS, CellOptions, Command, SweepOptions, exit_code
from bench.models import Models
from bench.printed import show
from bench.sweep import check_rounds, prompt_set, runnable, sampling
from bench.timing import Measurement, drive
from peagle_jax.cli import runs
from peagle_jax.config import EngineConfig
from peagle_jax.engine.engine import Engine

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options(CellOptions, SweepOptions):
    """Options of this command.

    Args:
      set: prompts: HumanEval, MT-Bench, or NAME=FILE (JSON lines, a text file, a folder of *.py)
      prompts_per_slot: prompts of a cell for each concurrent request
      min_prompts: least prompts of a cell
      prefill_chunk: tokens of a prompt per prefill call; default: 512 on a GPU, else 128
      prefill_rows: prompts per prefill call; default: 4 on a GPU, else 1
      small_prefills: also compile smaller prefill programs, for calls with few tokens; default: on
        a GPU
      repeats: runs of a cell, of which the row has the median; the runs of a concurrency then
        alternate between all methods
    """

    set: str = "HumanEval"
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompts_per_slot: int = 2
    min_prompts: int = 4
    prefill_chunk: int | None = None
    prefill_rows: int | None = None
    small_prefills: bool | None = None
    repeats: int = 1
    out: Path = RESULTS / "throughput.jsonl"

    @property
    def kind(self) -> str:
        """Of the rows: those of a comparison are not part of the tables of one run each."""
        if self.adaptive != ("off",):
            return "adaptive"
        return "throughput" if self.repeats == 1 else "methods"

    def num_prompts(self, concurrency: int) -> int:
        """A multiple of the concurrency, so that the batch stays full until near the end."""
        return max(self.min_prompts, self.prompts_per_slot * concurrency)


def run(options: Options) -> int:
    """Measures, a row each, and prints them.

    With repeats all engines exist at once, and the runs of a concurrency alternate between them.
    """
    environment = options.environment()
    sweep = _Sweep.of(Models.load(options), options)
    chosen = [
        Variant(method, num_draft, adaptive)
        for method, num_draft in sweep.models.variants(options)
        for adaptive in (options.adaptive if num_draft else ("off",))
    ]
    groups = [[variant] for variant in chosen] if options.repeats == 1 else [chosen]
    prompts = sum(map(options.num_prompts, options.concurrency))
    done = []
    with tqdm(total=options.repeats * len(chosen) * prompts, unit="prompt", disable=None) as bar:
        if options.jobs > 1:
            bar.set_description("compiling")
            work = [Work(_shaped_engine, options, (variant,)) for variant in chosen]
            compile_all(work, options.jobs, partial(bar.write, file=sys.stderr))
        for group in groups:
            engines = {variant: sweep.engine(variant) for variant in group}
            for engine in engines.values():
                runs.warm_up(engine)
            for concurrency in options.concurrency:
                measured = sweep.alternate(engines, concurrency, bar)
                for variant, some in measured.items():
                    row = sweep.row(variant, concurrency, some, engines[variant]) | environment
                    if variant.adaptive == "off":
                        of = engines[variant]
                        row |= roofline.fraction(row, of.target_config, of.drafter_config)
                    check_rounds(row)
                    done.append(rows.rounded(row))
                    rows.append(options.out, done[-1])
            del engines
            gc.collect()  # the caches, before the next engine makes its own
    show("sweep", done, options.out)
    return exit_code(sum(row["prompts_left_out"] for row in done))


def _shaped_engine(options: Options, variant: Variant) -> Engine:
    """The engine of a variant, with shapes for weights: what a process of `--jobs` compiles."""
    return _shaped_sweep(options).engine(variant)


@cache
def _shaped_sweep(options: Options) -> "_Sweep":
    models = Models.load(options)
    return replace(_Sweep.of(models, options), models=models.shapes())


@dataclass
class _Sweep:
    """Inputs of all cells, and the plain runs that others are compared with."""

    models: Models
    options: Options
    config: EngineConfig
    name: str
    pool: list[list[int]]
    left_out: int
    plain: dict[int, tuple[list[float], list]]  # concurrency -> tokens/s of each run, and outputs

    @classmethod
    def of(cls, models: Models, options: Options) -> "_Sweep":
        name, pool = prompt_set(
            options.set,
            models.tokenizer,
            prompt_tokens=options.prompt_tokens,
            limit=None,
            chat=models.uses_chat(options),
        )
        config = cells_config(
            options.concurrency,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
            programs_folder=options.programs_folder,
            rounds_per_call=options.rounds_per_call,
            **options.drafting(),
        )
        config = runs.with_prefill_sizes(
            config,
            prefill_chunk=options.prefill_chunk,
            prefill_rows=options.prefill_rows,
            small_prefills=options.small_prefills,
        )
        pool, left_out = runnable(models, name, pool, sampling(options), config)
        return cls(models, options, config, name, pool, left_out, {})

    def engine(self, variant: Variant) -> Engine:
        """An engine of the variant, not yet warm."""
        config = replace(self.config, adaptive=variant.adaptive)
        return self.models.engine(variant.method, variant.num_draft, config)

    def alternate(
        self, engines: dict[Variant, Engine], concurrency: int, bar: tqdm
    ) -> dict[Variant, list[Measurement]]:
        """`options.repeats` runs of each engine, in turn."""
        count = self.options.num_prompts(concurrency)
        prompts = list(itertools.islice(itertools.cycle(self.pool), count))
        params = sampling(self.options)
        short = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
        for variant, engine in engines.items():
            # The first rounds of a batch size pay for what later ones find in place. A choice by
            # load needs as much text as a run before it has settled.
            bar.set_description(f"{variant} x{concurrency}: warm-up")
            if variant.adaptive == "off":
                drive(engine, prompts[:concurrency], short, concurrency=concurrency)
            else:
                drive(engine, prompts, params, concurrency=concurrency)
        measured = {variant: [] for variant in engines}
        for _ in range(self.options.repeats):
            for variant, engine in engines.items():
                bar.set_description(f"{variant} x{concurrency}")
                measured[variant].append(
                    drive(engine, prompts, params, concurrency=concurrency, on_finished=bar.update)
                )
        return measured

    def row(
        self, variant: Variant, concurrency: int, measured: list[Measurement], engine: Engine
    ) -> dict:
        """The row of the run with the median speed; its ratio is the median of ratios to the plain
        run of the same turn."""
        options, config = self.options, engine.config
        by_speed = sorted(measured, key=lambda one: one.seconds)
        median = by_speed[len(by_speed) // 2]
        sizes = ("max_model_len", "prefill_rows", "prefill_chunk", "small_prefills")
        row = {
            **options.drafting_row(options.kind),
            **self.models.identity(
                options, prompts=self.name, variant=variant[:2], concurrency=concurrency
            ),
            **median.as_row(),
            "prompts_left_out": self.left_out,
            "rounds_per_call": config.repeat,
            "engine": {name: getattr(config, name) for name in (*sizes, "long_prefills")},
        }
        speeds = [one.as_row()["tokens_per_second"] for one in measured]
        if len(measured) > 1:
            row["tokens_per_second_of_repeats"] = speeds
            row["ms_per_round_of_repeats"] = [one.ms_per_round for one in measured]
        if options.adaptive != ("off",):
            row["adaptive"] = variant.adaptive
        if variant.adaptive != "off":
            chosen = engine.scheduler.num_draft_at
            row["drafts_by_batch_size"] = {n: chosen(n) for n in config.batch_buckets}
        if variant.method == "none":
            self.plain[concurrency] = speeds, median.outputs
        if concurrency in self.plain:
            base, outputs = self.plain[concurrency]
            pairs = zip(outputs, median.outputs, strict=True)
            ratios = [speed / plain for speed, plain in zip(speeds, base, strict=True)]
            row["ratio_to_plain"] = statistics.median(ratios)
            row["outputs_equal_to_plain"] = sum(a == b for a, b in pairs)
        return row


COMMAND = Command(
    examples=(
        "throughput --concurrency 1,8,32 -K 7",
        "throughput --methods none,peagle -K 7 --adaptive off,load --repeats 5",
    ),
    description="""
Decodes the same prompts in every cell (a method, a K and a concurrency), one cell after the other,
in one process. The batch buckets are the concurrencies. K is the number of drafts per round. A row
has tokens per second, milliseconds per round, time to first token (TTFT), the ratio to plain
decoding, and the floor (the least time of a round, from its bytes and operations). With --adaptive
load the engine chooses K of each round, at most the given one (docs/adaptive.md); the rows of such
a comparison have the kind "adaptive"; those of several repeats at fixed K the kind "methods".
""",
    options=Options,
    run=run,
    removed={"ngram": "drafts that are copied from the text did not pay; leave it out"},
)
