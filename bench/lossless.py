"""`peagle-bench lossless`: compares greedy output with and without speculation, token by token.

Plain decoding at the largest concurrency is the reference. Every other cell (method, K,
concurrency) decodes the same prompts. From the first difference of a text on, all its tokens count
as different.

Drafts of a head with random weights are almost never accepted, so acceptance would be untested.
Presets therefore replace a share of the drafts by the reference's tokens, see `Oracle`. The
acceptance rule and everything else are the engine's own.
"""

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import rows
from bench.cells import PLAIN, Variant, cells_config, progress_bar
from bench.command import (
    RESULTS,
    CellOptions,
    Command,
    EngineOptions,
    ModelOptions,
    check_preset,
    exit_code,
)
from bench.models import Models, random_models
from bench.oracle import KNOWN, Oracle, RandomTimes
from bench.presets import preset
from bench.printed import show
from bench.sweep import prompt_set, runnable
from bench.timing import drive
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams

_LISTED = 8  # differences in a row, at most
_LEAST_PROMPTS = 4  # of a cell
_PAGE = 64
_COUNTED = ("prompt_tokens", "rounds", "drafted", "accepted", "acceptance_length")
_COUNTED += ("acceptance_per_position", "seconds")

Cells = dict[Variant, tuple[int, ...]]
"""Concurrencies of each variant."""


@dataclass(frozen=True, kw_only=True)
class Options(CellOptions, EngineOptions, ModelOptions):
    """Options of this command.

    Args:
      preset: a full-size model with random weights, as for decode-step
      set: prompts: HumanEval, MT-Bench, or NAME=FILE (JSON lines, a text file, a folder of *.py);
        not for presets
      prompt_tokens: longest prompt of a preset, and length of prompts that are cut from text
      tokens: number of tokens to compare, of all cells together
    """

    k: tuple[int, ...] = (3, 7)
    preset: str | None = None
    set: str = "HumanEval"
    prompt_tokens: int = 256
    prefill_chunk: int = 128
    tokens: int = 20_000
    concurrency: tuple[int, ...] = (1, 32)
    max_tokens: int = 256
    out: Path = RESULTS / "lossless.jsonl"

    def check(self) -> None:
        super().check()
        if self.preset is not None:
            check_preset(self.preset)

    @property
    def only_greedy(self) -> bool:
        """Whether programs of rounds that are not greedy are left out."""
        return self.adaptive == ("off",)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts: `prompts(n)` returns n lists of token ids; `left_out` are too long for outputs."""

    set: str
    prompts: Callable[[int], list[list[int]]]
    left_out: int = 0


def random_texts(options: Options) -> Texts:
    """Prompts of 1 to `--prompt-tokens` random tokens for a preset.

    Raises:
      ConfigError: options that exclude each other.
    """
    target = preset(options.preset, options.layers).target
    if options.model is not None or options.drafter:
        raise ConfigError("--preset has random weights: drop --model and --drafter")
    if options.prompt_tokens + options.max_tokens > target.max_position:
        raise ConfigError(f"{options.preset} has {target.max_position} positions; ask for fewer")

    def prompts(count: int) -> list[list[int]]:
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, options.prompt_tokens + 1, count)
        return [rng.integers(0, target.vocab_size, length).tolist() for length in lengths]

    return Texts(set="random tokens", prompts=prompts)


def _subject(options: Options) -> tuple[Models, Texts]:
    """The models to compare, on all devices, and their prompts; of a set, repeated if too few.

    Raises:
      ConfigError: options that exclude each other, no tokenizer, or devices that cannot share.
    """
    if options.preset is not None:
        texts = random_texts(options)
        models = random_models(
            preset(options.preset, options.layers),
            options.methods,
            dtype=runs.choose_dtype(options.dtype),
            num_devices=options.tensor_parallel,
        )
        return replace(models, activations=options.activations), texts
    models = Models.load(options, tensor_parallel=options.tensor_parallel)
    name, found = prompt_set(
        options.set, models.tokenizer, prompt_tokens=options.prompt_tokens, limit=None
    )
    if models.tokenizer is None:
        raise ConfigError(f"{options.model}: has no tokenizer, so it cannot read the set {name}")
    most = models.target.config.max_position
    config = EngineConfig(max_model_len=max(1, most - options.max_tokens + 1))
    pool, left_out = runnable(models, name, found, SamplingParams(), config)
    prompts = lambda count: list(itertools.islice(itertools.cycle(pool), count))
    return models, Texts(set=name, prompts=prompts, left_out=left_out)


def engine_of(
    models: Models, variant: Variant, config: EngineConfig, texts: jax.Array | None
) -> Engine:
    """An engine for a method and a K. `texts` are those of an `Oracle`. A choice of K is made in
    each round, by random times."""
    method, num_draft, adaptive = variant
    head, drafter = models.heads.get(method), None
    if head is not None and models.is_random:
        drafter = Oracle(models.drafter(method, num_draft), texts, num_draft)
    config = replace(
        config,
        num_draft=num_draft,
        adaptive=adaptive,
        dtype=models.dtype,
        activations=models.activations,
    )
    times = None if adaptive == "off" else RandomTimes()
    engine = Engine(models.target, head, config, drafter=drafter, times=times)
    if engine.policy is not None:
        engine.policy.decide_every = 1
    return engine


def run(options: Options) -> int:
    """Compares every cell, a row each, and prints them; 1 if a token differs."""
    done = list(compare(options, options.environment()))
    show("lossless", done, options.out)
    if any(row["tokens_differing"] for row in done):
        return 1
    return exit_code(max(row["prompts_left_out"] for row in done))


def compare(options: Options, environment: dict) -> Iterator[dict]:
    """Compares every cell, a row at a time; rows go to `options.out`.

    Raises:
      ConfigError: there is nothing to compare, or it does not fit.
    """
    models, source = _subject(options)
    cells = cells_of(options, list(models.heads))
    prompts = source.prompts(num_prompts(options, cells))
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    reference: list[list[int]] = []
    texts = None
    shares = [_share(options, len(prompts), c) for some in cells.values() for c in some]
    with progress_bar(total=len(prompts) + sum(shares), unit="text") as bar:
        for variant, todo in engines_of(options, cells).items():
            bar.set_description(title := f"{variant[0]} K={variant[1]}")
            start = time.perf_counter()
            engine = engine_of(models, variant, config_of(options, prompts, todo), texts)
            runs.compile_missing(engine, only_greedy=options.only_greedy)
            engine.warm_up(only_greedy=options.only_greedy)
            compiled = time.perf_counter() - start
            for concurrency in todo:
                bar.set_description(f"{title} x{concurrency}")
                run = drive(
                    engine,
                    prompts[: _share(options, len(prompts), concurrency)],
                    params,
                    concurrency=concurrency,
                    on_finished=bar.update,
                )
                if not reference:
                    reference = run.outputs
                    whole = [one + two for one, two in zip(prompts, reference, strict=True)]
                    texts = text_table(whole, engine.config)
                    continue
                row = _row(options, models, source, variant, concurrency, reference, run)
                row["variant"] = "peers" if engine.config.gather == "peers" else None
                row |= {"rounds_per_call": engine.config.repeat, "compile_seconds": compiled}
                if engine.policy is not None:
                    row |= {"adaptive": variant.adaptive, "choices": engine.policy.num_changes}
                row |= environment
                rows.append(options.out, rows.rounded(row))
                bar.write(_progress(row), file=sys.stderr)
                yield row
            del engine
            gc.collect()  # its cache, before the next one is made


def engines_of(options: Options, cells: Cells) -> Cells:
    """Concurrencies of each engine; first the reference's."""
    plain = tuple(dict.fromkeys((max(options.concurrency), *cells.get(PLAIN, ()))))
    return {PLAIN: plain} | {one: todo for one, todo in cells.items() if one != PLAIN}


def cells_of(options: Options, drafting: Sequence[str]) -> Cells:
    """Concurrencies to compare; the reference is plain decoding at the largest one."""
    across = tuple(sorted(set(options.concurrency), reverse=True))
    variants = itertools.starmap(Variant, itertools.product(drafting, options.k, options.adaptive))
    cells = dict.fromkeys(variants, across)
    if "none" in options.methods and across[1:]:
        cells = {PLAIN: across[1:]} | cells
    if not cells:
        raise ConfigError("nothing to compare: no head to draft, and one concurrency only")
    return cells


def num_prompts(options: Options, cells: Cells) -> int:
    """Number of prompts that yield `--tokens` tokens to compare over all cells."""
    shares = sum(c for some in cells.values() for c in some) / max(options.concurrency)
    return max(_LEAST_PROMPTS, math.ceil(options.tokens / (options.max_tokens * shares)))


def _share(options: Options, num_prompts: int, concurrency: int) -> int:
    """Prompts of a cell. Cells of low concurrency get fewer, or they would take most of the
    time."""
    proportional = math.ceil(num_prompts * concurrency / max(options.concurrency))
    return min(num_prompts, max(_LEAST_PROMPTS, proportional))


def config_of(
    options: Options, prompts: list[list[int]], concurrencies: tuple[int, ...]
) -> EngineConfig:
    """Sizes of an engine, equal for all cells except the number of drafts."""
    longest = max(map(len, prompts)) + options.max_tokens + 2 * max(options.k) + 1
    most = max(concurrencies)
    return cells_config(
        concurrencies,
        max_num_seqs=most,
        max_model_len=-(-longest // _PAGE) * _PAGE,
        page_size=_PAGE,
        prefill_chunk=options.prefill_chunk,
        prefill_rows=min(options.prefill_rows, most),
        tensor_parallel=options.tensor_parallel,
        programs_folder=options.programs_folder,
    )


def text_table(texts: Sequence[list[int]], config: EngineConfig) -> jax.Array:
    """[texts, positions] int32: tokens of an `Oracle`."""
    table = np.zeros((len(texts), config.max_model_len), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(table)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference of two texts; None if they are equal."""
    pairs = enumerate(itertools.zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


def _row(
    options: Options,
    models: Models,
    source: Texts,
    variant: Variant,
    concurrency: int,
    reference: list[list[int]],
    run,
) -> dict:
    outputs, row = run.outputs, run.as_row()
    wanted = reference[: len(outputs)]
    differences = [first_difference(*pair) for pair in zip(wanted, outputs, strict=True)]
    ends = [max(map(len, pair)) for pair in zip(wanted, outputs, strict=True)]
    places = [(text, place) for text, place in enumerate(differences) if place is not None]
    return {
        "kind": "lossless" if options.tensor_parallel == 1 else "parallel-lossless",
        "model": models.name,
        "dtype": models.dtype,
        "weights": models.weights,
        "activations": models.activations,
        "layers": models.target.config.num_layers,
        "tensor_parallel": options.tensor_parallel,
        "set": source.set,
        "method": variant.method,
        "num_speculative_tokens": variant.num_draft,
        "concurrency": concurrency,
        "max_tokens": options.max_tokens,
        "temperature": 0.0,
        "oracle": KNOWN if models.is_random and variant != PLAIN else None,
        "reference_concurrency": max(options.concurrency),
        "prompts_left_out": source.left_out,
        "texts": len(outputs),
        "texts_equal": differences.count(None),
        "tokens_compared": sum(map(len, wanted)),
        "tokens_differing": sum(ends[text] - place for text, place in places),
        "distinct_tokens": len(set(itertools.chain(*wanted))),
        "parted_at": [list(one) for one in places[:_LISTED]],
        **{name: row[name] for name in _COUNTED},
    }


def _progress(row: dict) -> str:
    return (
        f"{row['method']} K={row['num_speculative_tokens']} x{row['concurrency']}: "
        f"{row['tokens_differing']} of {row['tokens_compared']:,} tokens differ, AL "
        f"{row['acceptance_length']:.2f}; {row['seconds']:.1f} s, compiled in "
        f"{row['compile_seconds']:.0f} s"
    )


COMMAND = Command(
    examples=(
        "lossless --preset qwen3-coder-30b-a3b-fp8 -K 3,7 --tokens 100000",
        "lossless --concurrency 1,8,32",
        "lossless -K 7 --adaptive load --tokens 100000",
    ),
    description="""
Decodes the same prompts in every cell (a method, a K and a concurrency), and compares each output
with the reference: plain decoding at the largest concurrency. Exit code 1 if a token differs.

A preset has random weights, made on the device, and prompts of random tokens. Drafts of random
heads are almost never right, so seven of ten drafts are replaced by the reference's tokens. Drafts
are then both accepted and rejected. Without --preset the embedded model or --model is compared.

With --adaptive load the engine chooses K by times that are drawn at random, so that it changes in
nearly every call.
""",
    options=Options,
    run=run,
    removed={
        "warm": "the tests of the prefix cache compare cached texts; leave it out",
        "jobs": "programs compile side by side by themselves; leave it out",
        "quantization": "no row had it; leave it out",
        **dict.fromkeys(
            ("page-size", "small-prefills", "rounds-per-call", "gather", "seed", "min-prompts"),
            "rows have one value of it; leave it out",
        ),
    },
)
