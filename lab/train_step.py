"""`python -m lab train-step`: a step of a head's training for a full-size target."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from bench import rows
from bench.command import Command, RowOptions, check_preset, list_of_positive, option
from bench.models import Models
from bench.presets import preset
from bench.printed import show_table
from peagle_jax.config import ConfigError
from peagle_jax.devices import Devices
from peagle_jax.models.weight_order import order_weights
from peagle_jax.training import drafter, recipe
from peagle_jax.training.trainer import make_optimizer, make_step


@dataclass(frozen=True, kw_only=True)
class Options(RowOptions):
    """Options of this command.

    Args:
      preset: full-size target with random weights
      layers: the first N layers of the preset only
      method: kind of head
      length: tokens of a row, each in turn
      step_tokens: tokens of a step; one row without it
      num_devices: devices that share a step
      steps: steps measured, after one that compiles
    """

    preset: str
    layers: int | None = None
    method: str = option("peagle", choices=("peagle", "eagle3"))
    length: tuple[int, ...] = option((4096, 20480), type=list_of_positive, metavar="N,N")
    step_tokens: int | None = None
    num_devices: int = 1
    steps: int = 5
    out: Path = Path("train_step.jsonl")


def run(options: Options) -> int:
    """Measures each length and prints milliseconds and memory."""
    check_preset(options.preset)
    chosen = preset(options.preset, options.layers)
    models = Models.random(chosen, [], dtype="bfloat16")
    order_weights(models.target, "bf16")
    found = []
    for length in options.length:
        row = {"kind": "train-step", "model": chosen.name, "weights": chosen.weights}
        row |= {"layers": chosen.target.num_layers, "method": options.method}
        try:
            row |= measure(models.target, options, length)
        except jax.errors.JaxRuntimeError as error:  # out of memory
            row |= {"length": length, "error": str(error).splitlines()[0][:200]}
        found.append(rows.rounded(row | options.environment()))
        rows.append(options.out, found[-1])
    names = ("length", "tokens", "pieces", "ms", "tokens_per_s", "peak_gib", "planned_gib", "error")
    lines = [[str(one.get(name, "")) for name in names] for one in found]
    show_table(list(names), lines, options.out)
    return 0


def measure(target, options: Options, length: int) -> dict:
    """Row fields of a step of texts of `length` random tokens.

    Raises:
      ConfigError: the preset has no positions for `length`, or there are too few devices.
    """
    config = target.config
    if length > config.max_position:
        raise ConfigError(f"--length {length}: the preset has {config.max_position} positions")
    shape = recipe.shape_of(
        config,
        rows=1 << 20,
        heldout=1 << 20,
        length=length,
        step_tokens=options.step_tokens or length * options.num_devices,
        epochs=1,
        num_devices=options.num_devices,
    )
    head = recipe.head_config(config, method=options.method, mask_token_id=0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(target))
    plan = recipe.Plan(target=config, head=head, shape=shape, target_bytes=size)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        _save_texts(texts, shape, config.vocab_size)
        run = recipe.head_run(plan, texts, recipe.Length(steps=options.steps, minutes=None), 0)
        task, _ = drafter.make_task(head, target, recipe.head_options(plan, texts, "bfloat16"), run)
    optimizer = make_optimizer(run, task.params)
    step, devices = make_step(task.loss, run, optimizer), Devices(options.num_devices)
    constants, params = devices.copied(task.constants), devices.copied(task.params)
    state, seconds = optimizer.init(params), []
    for number in range(options.steps + 1):
        start = time.perf_counter()
        params, state, report = step(
            params, state, constants, task.batch(number), number, np.float32(1)
        )
        total, count = jax.block_until_ready(report["loss"])
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    ms = 1e3 * float(np.median(seconds[1:]))
    return {
        "length": length,
        "tokens": shape.tokens,
        "pieces": shape.microbatches,
        "num_devices": options.num_devices,
        "compile_s": seconds[0],
        "ms": ms,
        "tokens_per_s": 1e3 * shape.tokens / ms,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "planned_gib": sum(plan.memory().values()) / 2**30,
        "loss": float(total / count),
    }


def _save_texts(folder: Path, shape: recipe.Shape, vocab_size: int) -> None:
    """Random tokens behind prompts of a quarter of the row, for one step and its evaluation."""
    draw, count = np.random.default_rng(0), shape.batch
    for name in ("train", "heldout"):
        tokens = draw.integers(0, vocab_size, (count, shape.length)).astype(np.uint32)
        ends = dict(prompt=np.full(count, shape.length // 4), length=np.full(count, shape.length))
        np.savez(folder / f"{name}.npz", tokens=tokens, **ends)


COMMAND = Command(
    examples=("train-step --preset qwen3-coder-30b-a3b-fp8 --length 4096,20480",),
    description="""
Times a step of `peagle-train head` for a full-size target with random weights: one row of random
tokens of each length, on one device or with a row on each of several. Says the peak of device
memory beside what `peagle-train plan` says; the peak of a length includes those before it.
""",
    options=Options,
    run=run,
)
