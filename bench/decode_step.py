"""`peagle-bench decode-step`: rounds of full-size models with random weights, through the real engine.

A cell is a method, a K and a concurrency. All its requests arrive at once with prompts of random tokens.
Rounds are timed while every slot decodes; the time includes the host.
"""

import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from tqdm import tqdm

from bench import roofline, rows
from bench.cells import Variant, methods_of, variants
from bench.commands.decode_step import Options
from bench.compile_cells import Work, compile_all, decode_step_engine
from bench.kernel_times import profile_rounds
from bench.presets import preset
from bench.random_models import Models, models_of
from bench.random_weights import num_bytes
from bench.timing import dispatch_times, drive
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError
from peagle_jax.devices import own_devices
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams

_WARM_UP_TOKENS = 24
_MEASURED = 10**6  # number of the first request that is measured
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


Meet = Callable[[], object]
"""Called before each run that is timed."""


def work(options: Options) -> list[Work]:
    """The engines of a command, of one replica, for `compile_all`."""
    options = of_replica(options)
    engines = [(one, group) for one in variants(options) for group in _groups(options)]
    return [Work(decode_step_engine, options, engine) for engine in engines]


def of_replica(options: Options) -> Options:
    """The options of each of `--replicas` engines, which share the requests; without it they stay."""
    count = options.replicas or 1
    return replace(options, concurrency=tuple(c // count for c in options.concurrency))


def decode_step(options: Options, environment: dict) -> list[dict]:
    """Measures every cell, appends a row each to `options.out`, and returns the rows."""
    done = []
    for row in measured(options, environment):
        done.append(row)
        rows.append(options.out, row)
    return done


def measured(options: Options, environment: dict, meet: Meet = lambda: None) -> Iterator[dict]:
    """A row of each cell. One that does not fit into memory is skipped with a message."""
    chosen = preset(options.preset, options.layers, options.selector)
    todo = variants(options)
    _params(options)
    if options.prompt_tokens + options.max_tokens > chosen.target.max_position:
        raise ConfigError(
            f"{chosen.name} has {chosen.target.max_position} positions; ask for fewer"
        )
    dtype = runs.choose_dtype(options.dtype)
    num_cells = len(todo) * len(options.concurrency)
    with tqdm(total=num_cells, unit="cell", disable=None) as bar:
        if options.jobs > 1:
            bar.set_description("compiling")
            compile_all(work(options), options.jobs, partial(_say, bar))
        bar.set_description("weights")
        made = dict(dtype=dtype, seed=options.seed, num_devices=options.tensor_parallel)
        models = models_of(chosen, methods_of(todo), **made)
        held = num_bytes(models.target, *models.heads.values()) / 1e9
        _say(bar, f"{chosen.name}: {held:.1f} GB of weights made in {models.seconds:.1f} s")
        for variant in todo:
            for group in _groups(options):
                for row in _measure(options, models, variant, group, bar, meet):
                    row |= environment
                    if variant.adaptive == "off" and models.num_devices == 1:
                        method = variant.method
                        config = None if method == "none" else chosen.head(method)
                        row |= roofline.fraction(row, chosen.target, config)
                    row = rows.rounded(row)
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


def _groups(options: Options) -> list[tuple[int, ...]]:
    """Concurrencies that can share an engine: those whose prefill calls have equally many rows."""
    sizes = sorted(options.concurrency)
    return [tuple(group) for _, group in itertools.groupby(sizes, options.prefill_rows_of)]


def _measure(
    options: Options,
    models: Models,
    variant: Variant,
    group: tuple[int, ...],
    bar: tqdm,
    meet: Meet,
) -> Iterator[dict]:
    """Rows of one engine, without their environment. Cells that do not fit into memory are skipped."""
    name = variant.name
    while group:
        try:
            bar.set_description(f"{name}: compiling for {', '.join(map(str, group))}")
            start = time.perf_counter()
            engine = models.engine(options, variant, group)
            engine.warm_up(only_greedy=engine.config.only_greedy)
            compiled = time.perf_counter() - start
            break
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            _skip(error, f"{name} at concurrency {group[-1]}", bar)
            group, engine = group[:-1], None
        gc.collect()  # the one that did not fit, before a smaller one is made
    for concurrency in group:
        bar.set_description(f"{name} x{concurrency}")
        try:
            row = _cell(options, engine, concurrency, meet)
            if options.profile is not None:
                bar.set_description(f"{name} x{concurrency}: profile")
                row |= _profile(options, engine, concurrency, bar)
        except jax.errors.JaxRuntimeError as error:
            # The failed call consumed its donated buffers, so this engine is unusable.
            left = group[group.index(concurrency) :]
            _skip(error, f"{name} at concurrency {', '.join(map(str, left))}", bar, len(left))
            return
        yield _identity(options, models, variant, engine) | {"compile_seconds": compiled} | row
        bar.update()


def _skip(error: Exception, what: str, bar: tqdm, cells: int = 1) -> None:
    """Reports cells that are skipped because memory is too small; re-raises any other error."""
    message = " ".join(str(error).split())
    no_room = isinstance(error, ConfigError) or any(sign in message for sign in _OUT_OF_MEMORY)
    if not no_room:
        raise error
    _say(bar, f"skipped {what}: {message[:300]}")
    bar.update(cells)


def _identity(options: Options, models: Models, variant: Variant, engine: Engine) -> dict:
    """Row fields that identify the measurement."""
    method, num_draft, adaptive = variant
    head = models.heads.get(method)
    is_drawn = num_draft and options.synthetic_acceptance_rows is not None
    return {
        "kind": kind(options),
        "model": models.preset.name,
        "dtype": models.dtype,
        "weights": models.preset.weights,
        "kv_cache_dtype": engine.config.kv_cache_dtype,
        "activations": engine.config.activations,
        "layers": models.preset.target.num_layers,
        "set": "random tokens",
        "method": method,
        "num_speculative_tokens": num_draft,
        "synthetic_acceptance_length": options.synthetic_acceptance_length if num_draft else None,
        **(
            {
                "synthetic_acceptance_rows": options.synthetic_acceptance_rows.name,
                "synthetic_acceptance_set": options.synthetic_acceptance_set,
            }
            if is_drawn
            else {}
        ),
        **({"adaptive": adaptive} if kind(options) != "decode-step" else {}),
        **(
            {}
            if models.num_devices == 1
            else {
                "tensor_parallel": models.num_devices,
                "variant": "peers" if engine.config.gather == "peers" else None,
            }
        ),
        **({"presence_penalty": options.presence_penalty} if options.presence_penalty else {}),
        **({"top_k": options.top_k, "top_p": options.top_p} if is_filtered(options) else {}),
        **({"selector_rank": options.selector} if options.selector else {}),
        **({"rounds_per_call": engine.config.repeat} if options.is_repeated else {}),
        "draft_sampling": options.draft_sampling,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "engine": {
            name: getattr(engine.config, name)
            for name in ("num_draft", "max_num_seqs", "max_model_len", "page_size", "num_pages")
        }
        | {
            "prefill_rows": engine.config.prefill_rows,
            "prefill_chunk": engine.config.prefill_chunk,
            "long_prefills": engine.config.long_prefills,
        },
        "weights_bytes": num_bytes(models.target, *([] if head is None else [head])),
        "weights_seconds": models.seconds,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def kind(options: Options) -> str:
    """Kind of the rows: those of a comparison, and of several devices, are not part of the tables of fixed K."""
    if options.is_repeated:
        return "repeated-step"
    if options.tensor_parallel > 1 or options.replicas:
        return "parallel-step"
    if options.presence_penalty:
        return "controlled-step"
    if options.selector:
        return "selector-step"
    if is_filtered(options):
        return "filtered-step"
    is_fixed = all(variant.adaptive == "off" for variant in variants(options))
    return "decode-step" if is_fixed else "adaptive-step"


def is_filtered(options: Options) -> bool:
    """Whether rounds draw tokens from a part of the vocabulary."""
    return options.temperature > 0 and (options.top_k > 0 or options.top_p < 1)


def prompts_of(options: Options, count: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, a different prompt for each request."""
    rng = np.random.default_rng(options.seed)
    return rng.integers(0, vocab_size, (count, options.prompt_tokens)).tolist()


def _params(options: Options) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        presence_penalty=options.presence_penalty,
        ignore_eos=True,
    )


def _cell(options: Options, engine: Engine, concurrency: int, meet: Meet) -> dict:
    """Prefill alone, some times, then prefill and decoding, after a short run of both."""
    params = _params(options)
    with_tokens = lambda tokens: replace(params, max_tokens=tokens)
    prompts = prompts_of(options, concurrency, engine.target_config.vocab_size)
    run = lambda params: drive(engine, prompts, params, concurrency=concurrency)
    run(with_tokens(min(_WARM_UP_TOKENS, options.max_tokens)))
    if engine.policy is not None:
        run(params)  # the choice of K settles
    prefills = [run(with_tokens(1)).as_row() for _ in range(options.prefills)]
    prefill = sorted(prefills, key=lambda row: row["seconds"])[options.prefills // 2]
    before = engine.scheduler.num_preemptions
    # A request without a seed has its number: equal numbers draw the same texts in all cells.
    engine.numbers = itertools.count(_MEASURED)
    meet()
    with dispatch_times(engine) as dispatches:
        row = run(params).as_row()
    steady = concurrency * row["acceptance_length"] / row["ms_per_round_mean"]
    return {
        "concurrency": concurrency,
        **row,
        "dispatch_us": 1e6 * statistics.median(dispatches),
        "decode_tokens_per_second": 1e3 * steady,
        "ttft_ms_median": prefill["ttft_ms_median"],
        "ttft_ms_max": prefill["ttft_ms_max"],
        "prefill_ms": 1e3 * prefill["seconds"],
        "prefill_tokens_per_second": prefill["prompt_tokens"] / prefill["seconds"],
        **(
            {}
            if engine.policy is None
            else {"chosen_num_draft": engine.scheduler.num_draft_at(concurrency)}
        ),
        "preemptions": engine.scheduler.num_preemptions - before,
        "peak_memory_bytes": peak_memory(options.tensor_parallel),
    }


def _profile(options: Options, engine: Engine, concurrency: int, bar: tqdm) -> dict:
    """Kernels of some rounds: printed, and as part of the row (`kernels` None where there are none)."""
    prompts = prompts_of(options, concurrency, engine.target_config.vocab_size)
    traced = dict(rounds=options.profile_rounds, folder=options.profile or None)
    try:
        found = profile_rounds(engine, prompts, _params(options), **traced)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        # The cell is already timed: a failure of the profiler must not lose the row.
        _say(bar, f"no kernels to list: {type(error).__name__}: {error}")
        return {"kernels": None}
    if found is None:
        _say(bar, "no kernels to list: the trace shows no GPU, or requests were too short")
        return {"kernels": None}
    row = found.as_row(engine.target_config.num_layers)
    _say(bar, runs.table(["kernel", "per round", "us per round", "share"], found.lines()))
    _say(
        bar,
        f"{found.count:.0f} kernels a round, {row['kernels_per_layer']:.1f} a layer; {found.us:.0f} us of "
        f"kernels in {found.span_us:.0f} us, the device busy for {100 * found.busy:.0f} %",
    )
    return row


def peak_memory(num_devices: int) -> int | None:
    """Peak memory of the fullest device since process start in bytes; None if the platform does not report it."""
    stats = [device.memory_stats() or {} for device in own_devices(num_devices)]
    return max((one["peak_bytes_in_use"] for one in stats if one), default=None)
