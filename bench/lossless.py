"""`peagle-bench lossless`: compares greedy output with and without speculation, token by token.

Plain decoding at the largest concurrency is the reference. Every other cell (method, K, concurrency)
decodes the same prompts. From the first difference of a text on, all its tokens count as different.

Drafts of a head with random weights are almost never accepted, so acceptance would be untested. Presets
therefore replace a share of the drafts by the reference's tokens, see `Oracle`. The acceptance rule and
everything else are the engine's own.
"""

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from bench import rows, sweep
from bench.cells import CellsConfig
from bench.commands.lossless import Options, SubjectOptions
from bench.compile_cells import Work, compile_all
from bench.oracle import KNOWN, Oracle
from bench.presets import preset
from bench.progress import progress_bar, warm_up
from bench.random_models import Models, models_of
from bench.random_times import RandomTimes
from bench.timing import drive
from bench.warm import WARM, warm_run
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.engine import Engine
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.parallel.shares import check_shares
from peagle_jax.sampling_params import SamplingParams

_PLAIN = ("none", 0)
_LISTED = 8  # differences in a row, at most
_COUNTED = (
    "prompt_tokens", "rounds", "drafted", "accepted", "acceptance_length",
    "acceptance_per_position", "seconds",
)  # fmt: skip

Variant = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its heads and its prompts: `prompts(n)` returns n lists of token ids."""

    name: str
    dtype: str
    weights: str
    target: Decoder
    heads: dict[str, DraftHead]
    set: str
    prompts: Callable[[int], list[list[int]]]
    is_random: bool
    activations: str
    num_devices: int = 1
    left_out: int = 0
    """Number of prompts of the set that are too long for their outputs."""
    made: Models | None = None
    """Those of a preset, whose weights may be shapes."""

    def engine(self, variant: Variant, config: CellsConfig, texts: jax.Array | None) -> Engine:
        """An engine for a method and a K. `texts` are those of an `Oracle`. A choice of K or of the drafts that a round
        verifies is made in each round, by random times."""
        method, num_draft = variant
        head, drafter = self.heads.get(method), None
        if head is not None and self.is_random:
            drafter = Oracle(self.made.drafter(method, num_draft, "argmax"), texts, num_draft)
        numbers = dict(dtype=self.dtype, activations=self.activations)
        config = replace(config, num_draft=num_draft, tensor_parallel=self.num_devices, **numbers)
        times = None if config.adaptive == "off" else RandomTimes()
        engine = Engine(self.target, head, config, drafter=drafter, times=times)
        if engine.policy is not None:
            engine.policy.decide_every = 1
        return engine


def subject_of(options: SubjectOptions) -> Subject:
    """The preset, or the loaded model.

    Raises:
      ConfigError: options that exclude each other, or a model without a tokenizer.
    """
    made = _model_subject(options) if options.preset is None else _preset_subject(options)
    return replace(made, num_devices=options.tensor_parallel)


def _preset_subject(options: SubjectOptions, *, has_shapes_only: bool = False) -> Subject:
    """A preset with random weights, and prompts of 1 to `--prompt-tokens` random tokens.

    Args:
      has_shapes_only: for engines that compile and never run.
    """
    chosen, dtype = preset(options.preset, options.layers), runs.choose_dtype(options.dtype)
    if options.model is not None or options.drafter or options.quantization is not None:
        raise ConfigError("--preset has random weights: drop --model, --drafter and --quantization")
    longest = options.prompt_tokens + options.max_tokens
    if longest > chosen.target.max_position:
        raise ConfigError(
            f"{chosen.name} has {chosen.target.max_position} positions; ask for fewer"
        )
    rules = dict(dtype=dtype, num_devices=options.tensor_parallel)
    if has_shapes_only:
        models = Models.shapes(chosen, options.methods, **rules)
    else:
        models = models_of(chosen, options.methods, seed=options.seed, **rules)

    def prompts(count: int) -> list[list[int]]:
        rng = np.random.default_rng(options.seed)
        lengths = rng.integers(1, options.prompt_tokens + 1, count)
        return [rng.integers(0, chosen.target.vocab_size, length).tolist() for length in lengths]

    return Subject(
        name=chosen.name,
        dtype=dtype,
        weights=chosen.weights,
        target=models.target,
        heads=models.heads,
        set="random tokens",
        prompts=prompts,
        is_random=True,
        activations=options.activations,
        made=models,
    )


def _model_subject(options: SubjectOptions) -> Subject:
    """The embedded model or `--model`, and prompts of `--set`, repeated if they are too few."""
    models = sweep.Models.load(options)
    name, found = sweep.prompt_set(
        options.set, models.tokenizer, prompt_tokens=options.prompt_tokens, limit=None
    )
    if models.tokenizer is None:
        raise ConfigError(f"{options.model}: has no tokenizer, so it cannot read the set {name}")
    most = models.target.config.max_position
    config = EngineConfig(max_model_len=max(1, most - options.max_tokens + 1))
    pool, left_out = models.runnable(name, found, SamplingParams(), config)
    devices = Devices(options.tensor_parallel)
    for model in (models.target, *models.heads.values()):
        check_shares(model.config, devices.count)
    return Subject(
        name=models.name,
        dtype=models.dtype,
        weights=models.weights,
        target=devices.placed(models.target),
        heads={method: devices.placed(head) for method, head in models.heads.items()},
        set=name,
        prompts=lambda count: list(itertools.islice(itertools.cycle(pool), count)),
        is_random=False,
        activations=models.activations,
        left_out=left_out,
    )


def lossless(options: Options, environment: dict) -> Iterator[dict]:
    """Compares every cell, a row at a time; rows go to `options.out`.

    Raises:
      ConfigError: there is nothing to compare, or it does not fit.
    """
    if options.jobs > 1:
        compile_all(work(options), options.jobs, partial(print, file=sys.stderr))
    subject = subject_of(options)
    cells = _cells(options, list(subject.heads))
    prompts = subject.prompts(_num_prompts(options, cells))
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    reference: list[list[int]] = []
    texts = None
    shares = [_share(options, len(prompts), c) for some in cells.values() for c in some]
    with progress_bar(total=len(prompts) + sum(shares), unit="text") as bar:
        for variant, adaptive, todo in _engines(options, cells):
            bar.set_description(title := f"{variant[0]} K={variant[1]}")
            start = time.perf_counter()
            config = replace(_config(options, prompts, todo), adaptive=adaptive)
            engine = subject.engine(variant, config, texts)
            warm_up(engine, title)
            compiled = time.perf_counter() - start
            for concurrency in todo:
                bar.set_description(f"{title} x{concurrency}")
                some = prompts[: _share(options, len(prompts), concurrency)]
                decode = partial(
                    drive, engine, some, params, concurrency=concurrency, on_finished=bar.update,
                    reads_prefix_cache=False,
                )  # fmt: skip
                if not reference:
                    reference = decode().outputs
                    whole = [one + two for one, two in zip(prompts, reference, strict=True)]
                    texts = text_table(whole, engine.config)
                    if not options.warm:
                        continue
                if options.warm:
                    run = warm_run(engine, some, reference, concurrency=concurrency)
                    bar.update(len(some))
                else:
                    run = decode()
                row = _row(options, subject, variant, concurrency, reference, run)
                row["variant"] = "peers" if engine.config.gather == "peers" else None
                row |= {"rounds_per_call": engine.config.repeat, "compile_seconds": compiled}
                if engine.policy is not None:
                    row |= {"adaptive": adaptive, "choices": engine.policy.num_changes}
                row |= environment
                rows.append(options.out, rows.rounded(row))
                bar.write(_progress(row), file=sys.stderr)
                yield row
            del engine
            gc.collect()  # its cache, before the next one is made


Cells = dict[tuple[Variant, str], tuple[int, ...]]


def _engines(options: Options, cells: Cells) -> list[tuple[Variant, str, tuple[int, ...]]]:
    """Method and K, what chooses K, and concurrencies of each engine; first the reference's."""
    plain = tuple(dict.fromkeys((max(options.concurrency), *cells.get((_PLAIN, "off"), ()))))
    return [
        (_PLAIN, "off", plain),
        *((*one, todo) for one, todo in cells.items() if one[0] != _PLAIN),
    ]


def work(options: Options) -> list[Work]:
    """The engines of a command over a preset, for `compile_all`."""
    drafting = [method for method in options.methods if method != "none"]
    engines = _engines(options, _cells(options, drafting))
    return [Work(_shaped_engine, options, engine) for engine in engines]


@cache
def _shapes(options: Options) -> Subject:
    return replace(
        _preset_subject(options, has_shapes_only=True), num_devices=options.tensor_parallel
    )


def _shaped_engine(
    options: Options, variant: Variant, adaptive: str, concurrencies: tuple[int, ...]
) -> Engine:
    """An engine with shapes for weights and texts."""
    subject = _shapes(options)
    prompts = subject.prompts(_num_prompts(options, _cells(options, list(subject.heads))))
    config = replace(_config(options, prompts, concurrencies), adaptive=adaptive)
    width = min(config.max_model_len, subject.target.config.max_position)
    texts = jax.ShapeDtypeStruct((len(prompts), width), jnp.int32)
    return subject.engine(variant, config, texts)


def _cells(options: Options, drafting: Sequence[str]) -> Cells:
    """Concurrencies to compare by method, K, and what chooses K; the reference is plain decoding at the largest one."""
    across = tuple(sorted(set(options.concurrency), reverse=True))
    cells = {
        ((method, k), adaptive): across
        for method in drafting
        for k in options.k
        for adaptive in options.adaptive
    }
    plain = across if options.warm else across[1:]
    if "none" in options.methods and plain:
        cells = {(_PLAIN, "off"): plain} | cells
    if not cells:
        raise ConfigError("nothing to compare: no head to draft, and one concurrency only")
    return cells


def _num_prompts(options: Options, cells: Cells) -> int:
    """Number of prompts that yield `--tokens` tokens to compare over all cells."""
    shares = sum(c for some in cells.values() for c in some) / max(options.concurrency)
    return max(options.min_prompts, math.ceil(options.tokens / (options.max_tokens * shares)))


def _share(options: Options, num_prompts: int, concurrency: int) -> int:
    """Prompts of a cell. Cells of low concurrency get fewer, or they would take most of the time."""
    proportional = math.ceil(num_prompts * concurrency / max(options.concurrency))
    return min(num_prompts, max(options.min_prompts, proportional))


def _config(
    options: Options, prompts: list[list[int]], concurrencies: tuple[int, ...]
) -> CellsConfig:
    """Sizes of an engine, equal for all cells except the number of drafts."""
    longest = max(map(len, prompts)) + options.max_tokens + 2 * max(options.k) + 1
    most = max(options.concurrency)
    return CellsConfig(
        concurrencies=concurrencies,
        max_num_seqs=most,
        max_model_len=-(-longest // options.page_size) * options.page_size,
        page_size=options.page_size,
        prefill_chunk=options.prefill_chunk,
        prefill_rows=min(options.prefill_rows, most),
        small_prefills=options.small_prefills,
        prefix_caching=options.warm,
        rounds_per_call=options.rounds_per_call,
        tensor_parallel=options.tensor_parallel,
        gather=options.gather,
        only_greedy=options.adaptive == ("off",),
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


def kind(options: Options) -> str:
    """Kind of the rows: those of several devices are not part of the tables of one."""
    if options.warm:
        return "lossless-warm"
    return "lossless" if options.tensor_parallel == 1 else "parallel-lossless"


def _row(
    options: Options, subject: Subject, variant: Variant, concurrency: int, reference, run
) -> dict:
    outputs, row = run.outputs, run.as_row()
    wanted = reference[: len(outputs)]
    differences = [first_difference(*pair) for pair in zip(wanted, outputs, strict=True)]
    ends = [max(map(len, pair)) for pair in zip(wanted, outputs, strict=True)]
    differing = [
        end - place for end, place in zip(ends, differences, strict=True) if place is not None
    ]
    several = dict(tensor_parallel=subject.num_devices, seed=options.seed)
    return {
        "kind": kind(options),
        "model": subject.name,
        "dtype": subject.dtype,
        "weights": subject.weights,
        "activations": subject.activations,
        "layers": subject.target.config.num_layers,
        **({} if subject.num_devices == 1 else several),
        "set": subject.set,
        "method": variant[0],
        "num_speculative_tokens": variant[1],
        "concurrency": concurrency,
        "max_tokens": options.max_tokens,
        "temperature": 0.0,
        "oracle": KNOWN if subject.is_random and variant != _PLAIN else None,
        "reference_concurrency": max(options.concurrency),
        "prompts_left_out": subject.left_out,
        "texts": len(outputs),
        "texts_equal": differences.count(None),
        "tokens_compared": sum(map(len, wanted)),
        "tokens_differing": sum(differing),
        "distinct_tokens": len(set(itertools.chain(*wanted))),
        "parted_at": [[text, place] for text, place in enumerate(differences) if place is not None][
            :_LISTED
        ],
        **{name: row[name] for name in (*_COUNTED, *(WARM if options.warm else ()))},
    }


def _progress(row: dict) -> str:
    return (
        f"{row['method']} K={row['num_speculative_tokens']} x{row['concurrency']}: "
        f"{row['tokens_differing']} of {row['tokens_compared']:,} tokens differ, AL "
        f"{row['acceptance_length']:.2f}; {row['seconds']:.1f} s, compiled in {row['compile_seconds']:.0f} s"
    )
