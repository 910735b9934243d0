"""`peagle-bench decode-step`: rounds of full-size models with random weights, through the engine.

A cell is a method, a K and a concurrency. All its requests arrive at once with prompts of random
tokens. Rounds are timed while every slot decodes; the time includes the host.
"""

import gc
import itertools
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from bench import rows
from bench.cells import PLAIN, Variant, cells_config
from bench.command import (
    METHODS,
    RESULTS,
    CellOptions,
    Command,
    EngineOptions,
    check_num_drafts,
    check_preset,
    methods,
)
from bench.models import Models, random_models
from bench.presets import preset
from bench.printed import show
from bench.random_weights import num_bytes
from bench.synthetic import Scattered, synthetic_acceptance
from bench.timing import drive
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import first_devices
from peagle_jax.engine.engine import Engine
from peagle_jax.method.verify import verify
from peagle_jax.models.weight_order import order_weights
from peagle_jax.presets import PRESETS
from peagle_jax.sampling_params import SamplingParams

_DEFAULT_K = 7
_PAGE = 64
_PREFILLS = 3  # runs of the prefill alone; a row has their median
_WARM_UP_TOKENS = 24
_MEASURED = 10**6  # number of the first request that is measured
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Options(CellOptions, EngineOptions):
    """Options of this command.

    Args:
      preset: model, of those above; NAME-fp8: in FP8 blocks
      method: methods to time
      k: numbers of drafts per round; 7 without it
      synthetic_acceptance_length: accept as many drafts as give X tokens per round on average, 1 to
        K+1; without it a head with random weights decides, whose drafts are hardly ever accepted
      prompt_tokens: tokens per prompt
      max_tokens: new tokens per prompt
      temperature: temperature; 0: greedy, 1 spreads the tokens over many experts
    """

    preset: str
    method: tuple[str, ...] = methods(METHODS)
    k: tuple[int, ...] = ()
    synthetic_acceptance_length: float | None = None
    prompt_tokens: int = 512
    max_tokens: int = 512
    temperature: float = 1.0
    kv_cache_dtype: str = EngineConfig.kv_cache_dtype
    out: Path = RESULTS / "decode_step.jsonl"

    def prefill_rows_of(self, concurrency: int) -> int:
        """Rows of the prefill call: no more than requests."""
        return min(self.prefill_rows, concurrency)

    def check(self) -> None:
        super().check()
        check_num_drafts(self.k)
        check_preset(self.preset)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=True,
        )


def run(options: Options) -> int:
    """Measures every cell, a row each, and prints them."""
    measured = []
    for row in _measured(options, options.environment()):
        measured.append(row)
        rows.append(options.out, row)
    show("decode-step", measured, options.out)
    return 0


def variants(options: Options) -> list[Variant]:
    """The variants to measure, plain decoding first.

    Raises:
      ConfigError: K or an acceptance length without a drafter, or one that no rule can have.
    """
    length = options.synthetic_acceptance_length
    methods = [method for method in dict.fromkeys(options.method) if method != "none"]
    for name, is_given in (
        ("-K", bool(options.k)),
        ("--synthetic-acceptance-length", length is not None),
        ("--adaptive", set(options.adaptive) != {"off"}),
    ):
        if is_given and not methods:
            raise ConfigError(f"{name} needs a method that drafts: --method eagle3 or peagle")
    drafts = sorted(set(options.k or [_DEFAULT_K]))
    if length is not None:
        for num_draft in drafts:
            synthetic_acceptance(length, num_draft)
    plain = [PLAIN] if "none" in options.method else []
    return plain + list(
        itertools.starmap(Variant, itertools.product(methods, drafts, options.adaptive))
    )


def groups(options: Options) -> list[tuple[int, ...]]:
    """Concurrencies that can share an engine: those whose prefill calls have equally many rows."""
    sizes = sorted(set(options.concurrency))
    return [tuple(group) for _, group in itertools.groupby(sizes, options.prefill_rows_of)]


def engine_of(
    models: Models, options: Options, variant: Variant, concurrencies: tuple[int, ...]
) -> Engine:
    """An engine for cells that differ in concurrency only, not yet warm.

    Raises:
      ConfigError: their caches do not fit beside the weights.
    """
    method, num_draft, adaptive = variant
    most = max(concurrencies)
    tokens = options.prompt_tokens + options.max_tokens + 2 * num_draft + 1
    config = cells_config(
        concurrencies,
        num_draft=num_draft,
        adaptive=adaptive,
        max_num_seqs=most,
        max_model_len=-(-tokens // _PAGE) * _PAGE,
        page_size=_PAGE,
        prefill_chunk=options.prefill_chunk,
        prefill_rows=options.prefill_rows_of(most),
        dtype=models.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        tensor_parallel=models.num_devices,
        activations=options.activations,
        greedy_rounds=None if options.temperature == 0 else False,
        programs_folder=options.programs_folder,
    )
    head, drafter, accept = models.heads.get(method), None, verify
    if head is not None:
        made = models.drafter(method, num_draft)
        drafter = Scattered(made, models.target.config.vocab_size, num_draft)
        if (length := options.synthetic_acceptance_length) is not None:
            accept = synthetic_acceptance(length, num_draft)
    order_weights(models.target, options.activations)
    return Engine(models.target, head, config, drafter=drafter, accept=accept)


def only_greedy(options: Options, variant: Variant) -> bool:
    """Whether all rounds of an engine are greedy; others are then not compiled."""
    return options.temperature == 0 and variant.adaptive == "off"


def _measured(options: Options, environment: dict) -> Iterator[dict]:
    """A row of each cell. One that does not fit into memory is skipped with a message."""
    chosen = preset(options.preset, options.layers)
    todo = variants(options)
    _ = options.params  # its mistakes show before weights are made
    if options.prompt_tokens + options.max_tokens > chosen.target.max_position:
        raise ConfigError(
            f"{chosen.name} has {chosen.target.max_position} positions; ask for fewer"
        )
    num_cells = len(todo) * len(set(options.concurrency))
    with tqdm(total=num_cells, unit="cell", disable=None) as bar:
        bar.set_description("weights")
        models = random_models(
            chosen,
            list(dict.fromkeys(variant.method for variant in todo)),
            dtype=runs.choose_dtype(options.dtype),
            num_devices=options.tensor_parallel,
        )
        for variant, group in itertools.product(todo, groups(options)):
            for row in _measure(options, models, variant, group, bar):
                row = rows.rounded(row | environment)
                _say(bar, _progress(row))
                yield row
            gc.collect()  # the engine's cache, before the next one is made


def _say(bar: tqdm, text: str) -> None:
    """Prints to stderr, which is unbuffered, so that the output of a killed run is complete."""
    bar.write(text, file=sys.stderr)


def _progress(row: dict) -> str:
    return (
        f"{row['method']} K={row['num_speculative_tokens']} x{row['concurrency']}: "
        f"{row['ms_per_round']:.2f} ms a round, {row['tokens_per_second']:.0f} tokens/s, "
        f"prefill {row['prefill_ms']:.0f} ms, compiled in {row['compile_seconds']:.0f} s"
    )


def _measure(
    options: Options, models: Models, variant: Variant, group: tuple[int, ...], bar: tqdm
) -> Iterator[dict]:
    """Rows of one engine, without their environment. Cells that do not fit are skipped."""
    while group:
        try:
            bar.set_description(f"{variant}: compiling for {', '.join(map(str, group))}")
            start = time.perf_counter()
            engine = engine_of(models, options, variant, group)
            runs.compile_missing(engine, only_greedy=only_greedy(options, variant))
            engine.warm_up(only_greedy=only_greedy(options, variant))
            compiled = time.perf_counter() - start
            break
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            _skip(error, f"{variant} at concurrency {group[-1]}", bar)
            group, engine = group[:-1], None
        gc.collect()  # the one that did not fit, before a smaller one is made
    for concurrency in group:
        bar.set_description(f"{variant} x{concurrency}")
        try:
            row = _cell(options, engine, concurrency)
        except jax.errors.JaxRuntimeError as error:
            # The failed call consumed its donated buffers, so this engine is unusable.
            left = group[group.index(concurrency) :]
            _skip(error, f"{variant} at concurrency {', '.join(map(str, left))}", bar, len(left))
            return
        yield _identity(options, models, variant, engine) | {"compile_seconds": compiled} | row
        bar.update()


def _skip(error: Exception, what: str, bar: tqdm, cells: int = 1) -> None:
    """Reports cells that are skipped because memory is too small; re-raises any other error."""
    message = " ".join(str(error).split())
    if not isinstance(error, ConfigError) and not any(sign in message for sign in _OUT_OF_MEMORY):
        raise error
    _say(bar, f"skipped {what}: {message[:300]}")
    bar.update(cells)


def _identity(options: Options, models: Models, variant: Variant, engine: Engine) -> dict:
    """Row fields that identify the measurement."""
    method, num_draft, adaptive = variant
    head, config = models.heads.get(method), engine.config
    sizes = ("num_draft", "max_num_seqs", "max_model_len", "page_size", "num_pages")
    sizes += ("prefill_rows", "prefill_chunk", "long_prefills")
    row = {
        "kind": kind(options),
        "model": models.name,
        "dtype": models.dtype,
        "weights": models.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
        "activations": config.activations,
        "layers": models.target.config.num_layers,
        "set": "random tokens",
        "method": method,
        "num_speculative_tokens": num_draft,
        "synthetic_acceptance_length": options.synthetic_acceptance_length if num_draft else None,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "engine": {name: getattr(config, name) for name in sizes},
        "weights_bytes": num_bytes(models.target, *([] if head is None else [head])),
    }
    if kind(options) != "decode-step":
        row["adaptive"] = adaptive
    if models.num_devices > 1:
        row["tensor_parallel"] = models.num_devices
        row["variant"] = "peers" if config.gather == "peers" else None
    return row


def kind(options: Options) -> str:
    """Kind of the rows: those of other work are not part of the table of rounds at a fixed K."""
    if options.tensor_parallel > 1:
        return "parallel-step"
    return "decode-step" if options.adaptive == ("off",) else "adaptive-step"


def prompts_of(options: Options, count: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, a different prompt for each request."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (count, options.prompt_tokens)).tolist()


def _cell(options: Options, engine: Engine, concurrency: int) -> dict:
    """Prefill alone, some times, then prefill and decoding, after a short run of both."""
    params = options.params
    prompts = prompts_of(options, concurrency, engine.target_config.vocab_size)
    run = lambda params: drive(engine, prompts, params, concurrency=concurrency)
    run(replace(params, max_tokens=min(_WARM_UP_TOKENS, options.max_tokens)))
    if engine.policy is not None:
        run(params)  # the choice of K settles
    prefills = [run(replace(params, max_tokens=1)).as_row() for _ in range(_PREFILLS)]
    prefill = sorted(prefills, key=lambda row: row["seconds"])[_PREFILLS // 2]
    before = engine.scheduler.num_preemptions
    # A request without a seed has its number: equal numbers draw the same texts in all cells.
    engine.numbers = itertools.count(_MEASURED)
    row = run(params).as_row()
    row |= {
        "concurrency": concurrency,
        "decode_tokens_per_second": (
            1e3 * concurrency * row["acceptance_length"] / row["ms_per_round_mean"]
        ),
        "ttft_ms_median": prefill["ttft_ms_median"],
        "ttft_ms_max": prefill["ttft_ms_max"],
        "prefill_ms": 1e3 * prefill["seconds"],
        "prefill_tokens_per_second": prefill["prompt_tokens"] / prefill["seconds"],
        "preemptions": engine.scheduler.num_preemptions - before,
        "peak_memory_bytes": peak_memory(options.tensor_parallel),
    }
    if engine.policy is not None:
        row["chosen_num_draft"] = engine.scheduler.num_draft_at(concurrency)
    return row


def peak_memory(num_devices: int) -> int | None:
    """Peak memory of the fullest device since process start in bytes; None if not reported."""
    stats = [device.memory_stats() or {} for device in first_devices(num_devices)]
    return max((one["peak_bytes_in_use"] for one in stats if one), default=None)


COMMAND = Command(
    examples=(
        "decode-step --preset gpt-oss-20b --layers 4 --max-tokens 64",
        "decode-step --preset qwen3-coder-30b-a3b-fp8 --method none eagle3 peagle -K 3 7 \\\n"
        "      --synthetic-acceptance-length 3.1 --concurrency 1 8 32",
    ),
    description=f"""
Times rounds of the engine with a model of a released shape. Weights are random and made on the
device, so no checkpoint is needed; a large model needs a GPU. In a round the target checks the
drafts and the head makes the next ones. A cell is a method, a K (drafts per round) and a
concurrency. Each cell adds a row: milliseconds per round at a full batch (host included), tokens
per second, prefill and peak memory. With --adaptive load the engine chooses K of each round, at
most the given one (docs/adaptive.md); the rows of such a comparison have the kind "adaptive-step".
The first example below is short. docs/decode-step.md explains the fields of a row.

Presets: {textwrap.fill(", ".join(PRESETS), 100, break_on_hyphens=False)};
with -fp8 at the end in FP8 blocks (all but GPT-OSS, which is MXFP4).
""",
    options=Options,
    run=run,
    removed={
        **dict.fromkeys(
            ("selector", "selector-kind", "top-k", "top-p", "draft-sampling", "rounds-per-call"),
            "no row had it; leave it out",
        ),
        **dict.fromkeys(
            ("page-size", "small-prefills", "gather", "seed", "prefills"),
            "rows have one value of it; leave it out",
        ),
        "jobs": "programs compile side by side by themselves; leave it out",
        **dict.fromkeys(
            ("profile", "profile-rounds"), "`python -m lab.round_kernels` lists a round's kernels"
        ),
        "rows": "ragged rounds did not beat the best fixed K; leave it out",
        "weights": "weights are always random; leave it out",
        "variants": "use --method, -K and --adaptive, in a command for each",
        "presence-penalty": "no row had it; leave it out",
        "cold-start": "serve-load --preset measures the start of a server",
        "replicas": "replicas share nothing, so that each is measured alone; leave it out",
        **dict.fromkeys(
            ("synthetic-acceptance-rows", "synthetic-acceptance-set"),
            "use --synthetic-acceptance-length",
        ),
    },
)
