"""`peagle-bench train-step`: time and memory of a training step, by form and by length of the texts."""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import rows
from bench.commands.train_step import FORMS, Options
from peagle_jax.checkpoint.fields import read_config
from peagle_jax.cli import runs
from peagle_jax.cli.loading import embedded
from peagle_jax.training.__main__ import drafter_run
from peagle_jax.training.options import parser
from peagle_jax.training.trainer import make_optimizer, make_step

HEADER = ["form", "texts", "tokens", "ms/step", "tokens/s", "memory, GiB"]


@dataclass(frozen=True)
class Step:
    """A compiled step with its first arguments."""

    form: str
    shape: tuple[int, int]
    compiled: Any
    arguments: tuple

    def memory_bytes(self) -> int | None:
        """Arguments, results and temporary arrays; None where XLA does not report them."""
        used = self.compiled.memory_analysis()
        if used is None:
            return None
        return (
            used.argument_size_in_bytes
            + used.output_size_in_bytes
            - used.alias_size_in_bytes
            + used.temp_size_in_bytes
        )

    def milliseconds(self, steps: int) -> float:
        """Milliseconds of a step: the median of `steps`."""
        params, state, *rest = self.arguments
        times = []
        for _ in range(steps + 2):  # the first ones place the weights
            start = time.perf_counter()
            params, state, report = self.compiled(params, state, *rest)
            jax.block_until_ready((params, report))
            times.append(time.perf_counter() - start)
        return 1e3 * float(np.median(times[2:]))


def _random_texts(folder: Path, count: int, tokens: int, vocab_size: int) -> None:
    """A fifth of each text is prompt, as in the recipe's texts."""
    rng = np.random.default_rng(0)
    for name in ("train", "heldout"):
        np.savez(
            folder / f"{name}.npz",
            tokens=rng.integers(8, vocab_size, (count, tokens), np.uint32),
            prompt=np.full(count, max(1, tokens // 5), np.int32),
            length=np.full(count, tokens, np.int32),
        )


def _step(options: Options, form: str, shape: tuple[int, int], folder: Path) -> tuple:
    """(lowered step, its arguments) of a form."""
    texts, tokens = shape
    target = options.model or embedded("target")
    line = [
        "drafter", *FORMS[form].format(half=max(1, tokens // 2)).split(), "--target", str(target),
        "--text", str(folder), "--out", str(folder / form), "--steps", "1", "--batch", str(texts),
        "--dtype", options.dtype, *options.train_options,
    ]  # fmt: skip
    made = drafter_run(parser().parse_args(line))
    task = made.task
    optimizer = make_optimizer(made.run, task.params)
    params = jax.tree.map(jnp.copy, task.params)  # the step donates them
    arguments = (
        params, optimizer.init(params), task.constants, task.batch(0), 0, np.float32(1e-3),
    )  # fmt: skip
    return make_step(task, made.run, optimizer).lower(*arguments), arguments


def _compiled(lowered) -> tuple[Any, str | None]:
    try:
        return lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        return None, str(error).split("\n", 1)[0]


def train_step(options: Options, environment: dict) -> list[dict]:
    """Compiles all steps, times one after another, and appends a row each."""
    options = replace(options, dtype=runs.choose_dtype(options.dtype))
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    cells = [(form, shape) for shape in shapes for form in options.forms]
    vocab_size = read_config(Path(options.model or embedded("target")))["vocab_size"]
    done = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        waiting = []
        for form, (texts, tokens) in cells:
            where = Path(folder) / f"{texts}x{tokens}"
            where.mkdir(exist_ok=True)
            _random_texts(where, texts, tokens, vocab_size)
            lowered, arguments = _step(options, form, (texts, tokens), where)
            waiting.append((form, (texts, tokens), pool.submit(_compiled, lowered), arguments))
        for form, shape, compiled, arguments in waiting:
            compiled, problem = compiled.result()
            if problem is None:
                row, problem = _timed(Step(form, shape, compiled, arguments), options)
            if problem is not None:
                print(f"{form} {shape[0]}x{shape[1]}: {problem}", file=sys.stderr, flush=True)
                continue
            row = rows.rounded(dict(kind="train-step", **row, **environment))
            rows.append(options.out, row)
            done.append(row)
            print("  ".join(lines([row])[0]), flush=True)
    return done


def _timed(step: Step, options: Options) -> tuple[dict | None, str | None]:
    """(row, None), or why there is none."""
    try:
        took = step.milliseconds(options.steps)
    except jax.errors.JaxRuntimeError as error:
        return None, str(error).split("\n", 1)[0]
    texts, tokens = step.shape
    memory = step.memory_bytes()
    return dict(
        form=step.form, texts=texts, tokens=tokens, options=" ".join(options.train_options),
        dtype=options.dtype, ms_per_step=took,
        tokens_per_second=1e3 * texts * tokens / took,
        memory_gib=None if memory is None else memory / 2**30,
    ), None  # fmt: skip


def lines(done: list[dict]) -> list[list[str]]:
    """Lines below `HEADER`."""
    return [
        [
            row["form"],
            str(row["texts"]),
            str(row["tokens"]),
            f"{row['ms_per_step']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if row["memory_gib"] is None else f"{row['memory_gib']:.2f}",
        ]
        for row in done
    ]
