"""`peagle-bench throughput`: tokens per second of the three methods, over concurrency and K, in one run."""

import gc
import itertools
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache, partial

from tqdm import tqdm

from bench import roofline, rows
from bench.cells import CellsConfig
from bench.commands.throughput import Options
from bench.compile_cells import Work, compile_all
from bench.sweep import Models, check_rounds, prompt_set, sampling
from bench.timing import Measurement, drive
from peagle_jax.cli import runs
from peagle_jax.config import EngineConfig
from peagle_jax.engine.engine import Engine

_WARM_UP_TOKENS = 16


def _num_prompts(options: Options, concurrency: int) -> int:
    """A multiple of the concurrency, so that the batch stays full until near the end."""
    return max(options.min_prompts, options.prompts_per_slot * concurrency)


def kind(options: Options) -> str:
    """Kind of the rows: those of a comparison are not part of the tables of one run each."""
    if options.adaptive != ("off",):
        return "adaptive"
    return "throughput" if options.repeats == 1 else "methods"


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: a method, its most drafts per round, and their choice at run time."""

    method: str
    num_draft: int
    adaptive: str = "off"

    def __str__(self) -> str:
        chosen = "" if self.adaptive == "off" else f" by {self.adaptive}"
        return f"{self.method} K={self.num_draft}{chosen}"


def variants(models: Models, options: Options) -> list[Variant]:
    """Variants to measure; plain decoding, if asked for, is first."""
    return [
        Variant(method, num_draft, adaptive)
        for method, num_draft in models.variants(options)
        for adaptive in (options.adaptive if num_draft else ("off",))
    ]


def throughput(options: Options, environment: dict) -> list[dict]:
    """Measures, appends a row each to `options.out`, and returns the rows.

    With repeats all engines exist at once, and the runs of a concurrency alternate between them.
    """
    models = Models.load(options)
    sweep = _Sweep.of(models, options)
    chosen = variants(models, options)
    groups = [[variant] for variant in chosen] if options.repeats == 1 else [chosen]
    done = []
    total = (
        options.repeats * len(chosen) * sum(_num_prompts(options, c) for c in options.concurrency)
    )
    with tqdm(total=total, unit="prompt", disable=None) as bar:
        if options.jobs > 1:
            bar.set_description("compiling")
            say = partial(bar.write, file=sys.stderr)
            work = [Work(shaped_engine, options, (variant,)) for variant in chosen]
            compile_all(work, options.jobs, say)
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
    return done


def shaped_engine(options: Options, variant: Variant) -> Engine:
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
        config = CellsConfig(
            concurrencies=options.concurrency,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
            rounds_per_call=options.rounds_per_call,
            **options.drafting(),
        )
        config = runs.with_prefill_sizes(
            config,
            prefill_chunk=options.prefill_chunk,
            prefill_rows=options.prefill_rows,
            small_prefills=options.small_prefills,
        )
        pool, left_out = models.runnable(name, pool, sampling(options), config)
        return cls(models, options, config, name, pool, left_out, {})

    def engine(self, variant: Variant) -> Engine:
        """An engine of the variant, not yet warm."""
        config = replace(self.config, adaptive=variant.adaptive)
        return self.models.engine(variant.method, variant.num_draft, config)

    def alternate(
        self, engines: dict[Variant, Engine], concurrency: int, bar: tqdm
    ) -> dict[Variant, list[Measurement]]:
        """`options.repeats` runs of each engine, in turn."""
        count = _num_prompts(self.options, concurrency)
        prompts = list(itertools.islice(itertools.cycle(self.pool), count))
        params = sampling(self.options)
        short = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
        for variant, engine in engines.items():
            # The first rounds of a batch size pay for what later ones find in place. A choice by load
            # needs as much text as a run before it has settled.
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
        """The row of the run with the median speed; its ratio is the median of ratios to the plain run of the
        same turn."""
        by_speed = sorted(measured, key=lambda one: one.seconds)
        median = by_speed[len(by_speed) // 2]
        cell = (variant.method, variant.num_draft)
        row = {
            **self.options.drafting_row(kind(self.options)),
            **self.models.identity(
                self.options, prompts=self.name, variant=cell, concurrency=concurrency
            ),
            **median.as_row(),
            "prompts_left_out": self.left_out,
        }
        row["rounds_per_call"] = engine.config.repeat
        sizes = (
            "max_model_len",
            "prefill_rows",
            "prefill_chunk",
            "small_prefills",
            "long_prefills",
        )
        row["engine"] = {name: getattr(engine.config, name) for name in sizes}
        speeds = [one.as_row()["tokens_per_second"] for one in measured]
        if len(measured) > 1:
            row["tokens_per_second_of_repeats"] = speeds
            row["ms_per_round_of_repeats"] = [one.ms_per_round for one in measured]
        if self.options.adaptive != ("off",):
            row["adaptive"] = variant.adaptive
        if variant.adaptive != "off":
            sizes = engine.config.batch_buckets
            row["drafts_by_batch_size"] = {n: engine.scheduler.num_draft_at(n) for n in sizes}
        if variant.method == "none":
            self.plain[concurrency] = speeds, median.outputs
        if concurrency in self.plain:
            base, outputs = self.plain[concurrency]
            pairs = zip(outputs, median.outputs, strict=True)
            ratios = [speed / plain for speed, plain in zip(speeds, base, strict=True)]
            row["ratio_to_plain"] = statistics.median(ratios)
            row["outputs_equal_to_plain"] = sum(a == b for a, b in pairs)
        return row
