"""`python -m lab rollouts`: what a training loop pays for new weights, and its rollouts."""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from bench import rows
from bench.cells import cells_config
from bench.command import Command, SweepOptions, check_preset, methods
from bench.models import Models
from bench.presets import preset
from bench.sweep import prompt_set, runnable, sampling
from bench.timing import drive
from pallas_kernels import dispatch, formats, fp8_tiles
from peagle_jax import logprobs
from peagle_jax.checkpoint.incoming import by_name
from peagle_jax.cli import runs
from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.completion import Completion
from peagle_jax.models.quant import quantize_fp8
from peagle_jax.models.weight_order import order_weights
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.training.rollouts import texts_of

UPDATES = 5
_PAGE = 64
_SCORED = 8
"""Texts in one call of `logprobs`."""
_LEAVES = 4
"""Quantised weights that are compared with the host's."""


@dataclass(frozen=True, kw_only=True)
class Options(SweepOptions):
    """Options of this command.

    Args:
      preset: measure updates of this model with random weights, in place of rollouts; NAME-fp8: in
        FP8 blocks
      layers: the first N layers of the preset only
      answers: answers of a prompt
      concurrency: requests of a step; of updates the first number counts
      repeats: runs of a step, of which the row has the median
      set: prompts: HumanEval, MT-Bench, or NAME=FILE
    """

    preset: str | None = None
    layers: int | None = None
    answers: int = 8
    concurrency: tuple[int, ...] = (32, 128)
    repeats: int = 3
    set: str = "HumanEval"
    methods: tuple[str, ...] = methods(("none", "peagle"))
    k: tuple[int, ...] = (3, 7)
    max_model_len: int = 1024
    max_tokens: int = 256
    temperature: float = 1.0
    out: Path = Path("rollouts.jsonl")

    def check(self) -> None:
        super().check()
        if self.preset is not None:
            check_preset(self.preset)
        for count in self.concurrency:
            if count % self.answers:
                raise ConfigError(f"--concurrency {count} is no multiple of --answers")


def run(options: Options) -> int:
    """Measures, a row each, and prints them; 1 if texts differ or a program compiles."""
    environment, done = options.environment(), []
    for row in rollouts(options) if options.preset is None else updates(options):
        done.append(rows.rounded(row | environment))
        rows.append(options.out, done[-1])
        print(_line(done[-1]), flush=True)
    print(f"rows: {options.out}")
    return 0 if all(row.get("equal_texts", True) for row in done) else 1


def _line(row: dict) -> str:
    name = row.get("layout") or f"{row['method']} K={row['num_speculative_tokens']}"
    numbers = ", ".join(f"{one} {row[one]}" for one in _SHOWN if row.get(one) is not None)
    return f"{name} x{row['concurrency']}: {numbers}"


_SHOWN = (
    "seconds_first",
    "seconds_of_update",
    "growth_bytes",
    "held_bytes",
    "ms_per_round_before",
    "ms_per_round",
    "compiled",
    "equal_texts",
    "equal_bits",
    "tokens_per_second",
    "ratio_to_plain",
    "acceptance_length",
    "equal_logprobs",
    "largest_difference",
)


# ---- updates


def updates(options: Options) -> Iterator[dict]:
    """A row for each layout in which a trainer may have the weights on the device: the engine's
    own, FP8 in rows where the engine has tiles, and unquantised."""
    chosen, (method, *_) = preset(options.preset, options.layers), options.methods[::-1]
    dtype, count = runs.choose_dtype(options.dtype), options.concurrency[0]
    models = Models.random(chosen, [method], dtype=dtype)
    order_weights(models.target, options.activations)
    engine = _updated_engine(models, options, method, count)
    name, weights = models.name, models.weights
    del models  # the engine has arrays of its own where it arranges weights
    prompts = np.random.default_rng(0).integers(
        0, chosen.target.vocab_size, (count, options.prompt_tokens)
    )
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    measured = lambda: drive(engine, prompts.tolist(), params, concurrency=count)
    before = measured()
    given = {name: jnp.copy(leaf) for name, leaf in _leaves(engine).items()}
    for layout, changed in _LAYOUTS.items():
        changed(given)
        seconds, row = _updated(engine, unflatten_dict(given, sep="."), measured)
        after = row.pop("measured")
        if layout == "unquantised":
            row["equal_bits"] = _equal_bits(given, _leaves(engine))
        else:
            row["equal_texts"] = row["equal_texts"] and before.outputs == after.outputs
        yield {
            "kind": "weight-update",
            "model": name,
            "dtype": dtype,
            "weights": weights,
            "layout": layout,
            "concurrency": count,
            "method": method,
            "seconds_first": seconds[0],
            "seconds_of_update": statistics.median(seconds[1:]),
            "seconds_of_repeats": seconds,
            "ms_per_round_before": before.ms_per_round,
            **row,
            "given_bytes": sum(leaf.nbytes for leaf in given.values()),
        }


def _updated_engine(models: Models, options: Options, method: str, count: int) -> Engine:
    """A warm engine whose cache has room for its requests only."""
    tokens = options.prompt_tokens + options.max_tokens + 2 * options.k[-1] + 1
    length = _PAGE * -(-tokens // _PAGE)
    config = cells_config(
        (count,),
        max_num_seqs=count,
        max_model_len=length,
        page_size=_PAGE,
        num_pages=count * length // _PAGE + 1,
        prefill_chunk=options.prompt_tokens,
        prefill_rows=min(4, count),
        programs_folder=options.programs_folder,
    )
    engine = models.engine(method, options.k[-1], config)
    runs.compile_missing(engine, only_greedy=True)
    engine.warm_up(only_greedy=True)
    runs.first_rounds(engine)
    return engine


def _leaves(engine: Engine) -> dict[str, jax.Array]:
    return by_name(engine.programs.models[0])


def _as_rows(given: dict[str, jax.Array]) -> None:
    """FP8 tiles as the rows of checkpoints. One leaf after the other: two models do not fit beside
    the engine's."""
    for name, scale in _quantised(given):
        if formats.kind(given[name], scale) == "fp8_tiles":
            given[name] = jax.block_until_ready(jax.jit(fp8_tiles.restore)(given.pop(name)))


def _as_unquantised(given: dict[str, jax.Array]) -> None:
    """As a trainer has them: bfloat16, without scales."""
    unpacked = jax.jit(lambda values, scale: formats.dequantize(values, scale, jnp.bfloat16))
    for name, scale in _quantised(given):
        if formats.kind(given[name], scale) == "fp8":
            given[name] = jax.block_until_ready(unpacked(given.pop(name), scale))
            del given[_scale_of(name)]


_LAYOUTS = {"own": lambda given: None, "rows": _as_rows, "unquantised": _as_unquantised}


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def _quantised(given: dict[str, jax.Array]) -> list[tuple[str, jax.Array]]:
    """Names and scales of the quantised weights."""
    named = [name for name in given if name.endswith(".weight") and _scale_of(name) in given]
    return [(name, given[_scale_of(name)]) for name in named]


_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kw: _compiled.append(event) if "backend_compile" in event else None
)


def _updated(engine: Engine, given: dict, measured) -> tuple[list[float], dict]:
    """Seconds of one update, which compiles its checks, and of `UPDATES` others, and what they
    leave."""

    def update() -> float:
        start = time.perf_counter()
        engine.update_weights(given)
        jax.block_until_ready(jax.tree.leaves(engine.programs.models))
        return time.perf_counter() - start

    seconds = [update()]
    first = measured()
    _compiled.clear()
    programs, before = engine.programs.num_compiled, _memory()
    seconds += [update() for _ in range(UPDATES)]
    last = measured()
    after = _memory()
    return seconds, {
        "measured": last,
        "equal_texts": first.outputs == last.outputs,
        "compiled": len(_compiled) + engine.programs.num_compiled - programs,
        "growth_bytes": after.get("bytes_in_use", 0) - before.get("bytes_in_use", 0),
        "held_bytes": after.get("bytes_in_use"),
        "peak_bytes": after.get("peak_bytes_in_use"),
        "ms_per_round": last.ms_per_round,
        "ttft_ms_max": last.as_row()["ttft_ms_max"],
    }


def _memory() -> dict:
    gc.collect()
    return dispatch.default_device().memory_stats() or {}


def _equal_bits(given: dict[str, jax.Array], own: dict[str, jax.Array]) -> bool:
    """Whether the engine's weights are those that loading quantises on the host; of the first
    few."""
    is_equal = True
    for name, scale in _quantised(own)[:_LEAVES]:
        values = own[name]
        if formats.kind(values, scale) == "fp8_tiles":
            values = fp8_tiles.restore(values)
        pick = (0,) * (values.ndim - 2)  # one expert: the host is slow
        wanted = quantize_fp8(np.asarray(given[name][pick]))
        pairs = zip((values[pick], scale[pick]), wanted, strict=True)
        is_equal &= all(np.asarray(one).tobytes() == other.tobytes() for one, other in pairs)
    return is_equal


# ---- rollouts


def rollouts(options: Options) -> Iterator[dict]:
    """A row for each method, K and number of requests; the last one of an engine compares
    log-probabilities."""
    models = Models.load(options)
    config = runs.with_prefill_sizes(
        cells_config(
            options.concurrency,
            prefix_caching=True,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
            programs_folder=options.programs_folder,
            dtype=models.dtype,
            activations=models.activations,
        )
    )
    chat = models.uses_chat(options)
    name, pool = prompt_set(
        options.set, models.tokenizer, prompt_tokens=options.prompt_tokens, limit=None, chat=chat
    )
    pool, _ = runnable(models, name, pool, sampling(options), config)
    plain: dict[int, float] = {}
    for variant in models.variants(options):
        method = variant.method
        own = replace(config, num_draft=variant.num_draft)
        engine = Engine(models.target, models.heads.get(method), own, tokenizer=models.tokenizer)
        runs.warm_up(engine)
        for count in options.concurrency:
            row, done = _steps(engine, pool, count, options)
            if method == "none":
                plain[count] = row["tokens_per_second"]
            yield {
                "kind": "rollouts",
                **models.identity(options, prompts=name, variant=variant, concurrency=count),
                "answers": options.answers,
                **row,
                "ratio_to_plain": row["tokens_per_second"] / plain[count] if plain else None,
                **(compared(engine, done) if count == options.concurrency[-1] else {}),
            }
        del engine
        gc.collect()  # its cache, before the next one is made


def _steps(
    engine: Engine, pool: list[list[int]], count: int, options: Options
) -> tuple[dict, list[Completion]]:
    """The median of some equal steps, and the texts of the last one."""
    prompts = [pool[i // options.answers % len(pool)] for i in range(count)]
    asks = [replace(sampling(options), logprobs=0, seed=i) for i in range(count)]
    measured = []
    for _ in range(1 + options.repeats):  # first calls take longer
        engine.flush_prefix_cache()
        measured.append(runs.run(engine, prompts, asks))
    found = sorted(measured[1:], key=lambda one: one.seconds)[options.repeats // 2]
    row = found.as_json() | {"seconds_of_repeats": [one.seconds for one in measured[1:]]}
    row["cached_tokens"] = sum(one.cached for one in found.completions)
    return row, measured[-1].completions


def compared(engine: Engine, done: list[Completion]) -> dict:
    """Share of log-probabilities with the engine's bits, and the largest difference in nats."""
    target = engine.programs.models[0]
    longest = max(len(one.prompt) + len(one.tokens) for one in done)
    length = _PAGE * -(-longest // _PAGE)
    equal = total = 0
    largest = seconds = 0.0
    for begin in range(0, len(done), _SCORED):
        some = done[begin : begin + _SCORED]
        text = texts_of([*some, *[some[0]] * (_SCORED - len(some))], length)
        start = time.perf_counter()
        scores = np.asarray(logprobs(target, jnp.asarray(text.tokens), text.prompt, text.length))
        seconds = time.perf_counter() - start
        for row, first, end, one in zip(scores, text.prompt, text.length, some, strict=False):
            wanted = np.float32([token.logprob for token in one.logprobs])
            equal += int((row[first:end].view(np.int32) == wanted.view(np.int32)).sum())
            largest = max(largest, float(np.abs(row[first:end] - wanted).max()))
            total += len(wanted)
    return {
        "scored_tokens": total,
        "equal_logprobs": equal / total,
        "largest_difference": largest,
        "score_seconds": seconds,
    }


COMMAND = Command(
    examples=(
        "rollouts --preset qwen3-coder-30b-a3b-fp8 --concurrency 8",
        "rollouts --concurrency 32,128 -K 3,7",
    ),
    description="""
With --preset: seconds of Engine.update_weights from arrays of the device in the engine's own
layout, as FP8 rows, and unquantised; memory before and after, the time of a round, and whether
texts stay. Without it: tokens per second of steps of rollouts, some answers of each prompt, with
and without drafts, and the share of log-probabilities of peagle_jax.logprobs that have the engine's
bits. Exit code 1 if texts differ.
""",
    options=Options,
    run=run,
)
