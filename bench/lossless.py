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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode_step, rows, sweep
from bench.commands.lossless import Options, SubjectOptions
from bench.decode_step import CellsConfig
from bench.presets import preset
from bench.progress import progress_bar, warm_up
from bench.random_times import RandomTimes
from bench.timing import drive
from bench.warm import WARM, warm_run
from peagle_jax import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.draft_head import DraftHead
from peagle_jax.drafter import Drafter, DraftInputs, make_drafter
from peagle_jax.engine.descriptions import source_digest
from peagle_jax.engine.engine import Engine
from peagle_jax.models import Decoder
from peagle_jax.parallel.devices import Devices
from peagle_jax.parallel.shares import check_shares
from peagle_jax.sampling import accept_uniforms
from peagle_jax.sampling_params import SamplingParams

KNOWN = 0.7
"""Share of drafts that `Oracle` takes from the reference: AL 2.5 with K = 3 and 3.1 with K = 7."""
_PLAIN = ("none", 0)
_LISTED = 8  # differences in a row, at most
_COUNTED = (
    "prompt_tokens", "rounds", "drafted", "accepted", "acceptance_length",
    "acceptance_per_position", "seconds",
)  # fmt: skip

Variant = tuple[str, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Oracle:
    """A drafter that replaces a random share of its head's drafts by the reference's tokens.

    The choice is random by request and position. A sequence is identified by its newest token and that
    token's position; if two sequences agree in both, a draft may come from the other and be wrong.
    """

    drafter: Drafter
    texts: jax.Array  # [R, L] int32: prompts with what follows them, by position
    num_draft: int = field(metadata=dict(static=True))

    program_key: ClassVar[str] = source_digest(__file__)

    def propose(self, target, inputs: DraftInputs, cache: list):
        """As the drafter's own; `drafter.Drafter` states it."""
        drafter = replace(self.drafter, num_draft=self.num_draft)
        proposal, cache = drafter.propose(target, inputs, cache)
        row = jnp.maximum(inputs.num_real - 1, 0)[:, None]
        newest = jnp.take_along_axis(inputs.tokens, row, axis=1)  # [B, 1]
        place = inputs.start[:, None] + row + 1  # [B, 1], the newest token's
        token_at = lambda text, place: self.texts[text, jnp.minimum(place, self.texts.shape[1] - 1)]
        text = jnp.argmax(token_at(jnp.arange(self.texts.shape[0]), place) == newest, axis=1)
        ahead = place + 1 + jnp.arange(self.num_draft)  # [B, J]
        known = accept_uniforms(inputs.keys, ahead) < KNOWN
        tokens = jnp.where(known, token_at(text[:, None], ahead), proposal.tokens)
        return proposal._replace(tokens=tokens), cache

    def absorb(self, target, inputs: DraftInputs, cache: list) -> list:
        """As the drafter's own."""
        return self.drafter.absorb(target, inputs, cache)


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

    def engine(self, variant: Variant, config: CellsConfig, texts: jax.Array | None) -> Engine:
        """An engine for a method and a K. `texts` are those of an `Oracle`. A choice of K or of the drafts that a round
        verifies is made in each round, by random times."""
        method, num_draft = variant
        head, drafter = self.heads.get(method), None
        if head is not None and self.is_random:
            drafter = Oracle(make_drafter(head, num_draft, "argmax"), texts, num_draft)
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


def _preset_subject(options: SubjectOptions) -> Subject:
    """A preset with random weights, and prompts of 1 to `--prompt-tokens` random tokens."""
    chosen, dtype = preset(options.preset, options.layers), runs.choose_dtype(options.dtype)
    if options.model is not None or options.drafter or options.quantization is not None:
        raise ConfigError("--preset has random weights: drop --model, --drafter and --quantization")
    longest = options.prompt_tokens + options.max_tokens
    if longest > chosen.target.max_position:
        raise ConfigError(
            f"{chosen.name} has {chosen.target.max_position} positions; ask for fewer"
        )
    rules = dict(dtype=dtype, seed=options.seed, num_devices=options.tensor_parallel)
    models = decode_step.Models.make(chosen, options.methods, **rules)

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
    subject = subject_of(options)
    cells, most = _cells(options, subject), max(options.concurrency)
    prompts = subject.prompts(_num_prompts(options, cells))
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    reference: list[list[int]] = []
    texts = None
    shares = [_share(options, len(prompts), c) for some in cells.values() for c in some]
    with progress_bar(total=len(prompts) + sum(shares), unit="text") as bar:
        for variant, adaptive in dict.fromkeys([(_PLAIN, "off"), *cells]):
            todo = cells.get((variant, adaptive), ())
            if variant == _PLAIN:
                todo = tuple(dict.fromkeys((most, *todo)))
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
                row |= {"rounds_per_call": engine.config.repeat, "compile_seconds": compiled}
                if engine.policy is not None:
                    row |= {"adaptive": adaptive, "choices": engine.policy.num_changes}
                row |= environment
                rows.append(options.out, rows.rounded(row))
                bar.write(_progress(row), file=sys.stderr)
                yield row
            del engine
            gc.collect()  # its cache, before the next one is made


def _cells(options: Options, subject: Subject) -> dict[tuple[Variant, str], tuple[int, ...]]:
    """Concurrencies to compare by method, K, and what chooses K; the reference is plain decoding at the largest one."""
    across = tuple(sorted(set(options.concurrency), reverse=True))
    cells = {
        ((method, k), adaptive): across
        for method in subject.heads
        for k in options.k
        for adaptive in options.adaptive
    }
    plain = across if options.warm else across[1:]
    if "none" in options.methods and plain:
        cells = {(_PLAIN, "off"): plain} | cells
    if not cells:
        raise ConfigError("nothing to compare: no head to draft, and one concurrency only")
    return cells


def _num_prompts(options: Options, cells: dict[tuple[Variant, str], tuple[int, ...]]) -> int:
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
        prefix_caching=options.warm,
        rounds_per_call=options.rounds_per_call,
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
