"""Programs of the cells of decode-step and lossless, compiled beforehand and side by side.

Child processes make engines of shapes, without weights or caches; this process makes none, which
would take memory of the device. The measuring process loads the programs later.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from bench import decode_step, lossless
from bench.cells import Variant, progress_bar
from bench.models import Models
from bench.presets import Preset, preset
from bench.random_weights import random_head, random_target
from peagle_jax.cli import runs
from peagle_jax.config import EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.engine.device.compilation import Progress, compile_missing, named
from peagle_jax.engine.device.program import Program
from peagle_jax.engine.engine import Engine
from peagle_jax.method.drafter import Drafter, make_drafter


@dataclass(frozen=True, kw_only=True)
class Shapes(Models):
    """Models with shapes for weights: their engines compile and never run."""

    @classmethod
    def of(
        cls, chosen: Preset, methods: Sequence[str], *, dtype: str, num_devices: int = 1
    ) -> Self:
        """As `Models.random`."""
        shaped = lambda make: Devices(num_devices).placed(nnx.eval_shape(make))
        head = lambda method: random_head(chosen.head(method), dtype=dtype)
        return cls(
            name=chosen.name,
            dtype=dtype,
            weights=chosen.weights,
            target=shaped(lambda: random_target(chosen.target, chosen.format, dtype=dtype)),
            heads={one: shaped(partial(head, one)) for one in methods if one != "none"},
            is_random=True,
            num_devices=num_devices,
        )

    def drafter(
        self, method: str, num_draft: int, sampling: str = EngineConfig.draft_sampling
    ) -> Drafter:
        head = self.heads[method]
        target = self.target if self.num_devices == 1 else None
        make = partial(make_drafter, num_draft=num_draft, sampling=sampling)
        made = jax.eval_shape(make, head, target=target)
        return replace(made, head=head)  # `eval_shape` drops the shardings


@dataclass(frozen=True)
class Work:
    """An engine whose programs are to compile; a `compilation.Maker`.

    Args:
      make: a function at the top level of a module, so that it can be pickled: (options, *cell) ->
        an engine of shapes.
      options: those of its command.
      cell: arguments of `make` behind the options. Messages contain `str` of each.
      only_greedy: whether all requests are greedy.
    """

    make: Callable[..., Engine]
    options: Any
    cell: tuple
    only_greedy: bool = False

    def __call__(self) -> tuple[Any, Any, Sequence[Program]]:
        engine = self.make(self.options, *self.cell)
        programs = engine.programs
        rounds = programs.rounds_of_greedy if self.only_greedy else programs.rounds_of_any
        keys = (*programs.full_prefills, *programs.small_prefills, *rounds, *programs.copies)
        return programs, engine._state, keys


def compile_all(
    work: Sequence[Work],
    jobs: int,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
    on_ready: Callable[[int], object] = lambda index: None,
) -> None:
    """Compiles the missing programs of some engines onto disk, in `jobs` processes, in the order of
    `work`.

    The measuring process compiles or reports what these processes could not compile.

    Args:
      say: prints a line.
      seconds: after which the rest is left; None: no limit.
      on_ready: called with the index of an engine once all its programs are on disk, or cannot be.
    """
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    start, last = time.monotonic(), Progress(0, 0, 0.0)
    with progress_bar(unit="program") as bar:

        def report(progress: Progress) -> None:
            nonlocal last
            last, bar.total = progress, progress.total
            bar.update(progress.done - bar.n)

        failed = compile_missing(
            work,
            [None] * len(work),
            jobs=jobs,
            must_end=lambda: seconds is not None and time.monotonic() - start > seconds,
            report=report,
            on_ready=on_ready,
        )
    for (index, key), failure in failed.items():
        engine = " at ".join(map(str, work[index].cell))
        say(f"not compiled beforehand: {engine}: {named(key)}: {failure.reason}")
    if left := last.total - last.done:
        say(f"{left} programs are left, which compile one after another")
    done = last.done - sum(key is not None for _, key in failed)
    say(f"{done} programs compiled by {jobs} processes in {time.monotonic() - start:.0f} s")


def work_of(options: Any) -> list[Work]:
    """Engines of a command that can compile beforehand; of other commands none."""
    if isinstance(options, decode_step.Options):
        return [
            Work(_round_engine, options, (one, group), decode_step.only_greedy(options, one))
            for one in decode_step.variants(options)
            for group in decode_step.groups(options)
        ]
    if isinstance(options, lossless.Options) and options.preset is not None:
        drafting = [method for method in options.methods if method != "none"]
        engines = lossless.engines_of(options, lossless.cells_of(options, drafting))
        return [Work(_text_engine, options, one, options.only_greedy) for one in engines.items()]
    return []


def _round_engine(options: decode_step.Options, variant: Variant, group: tuple[int, ...]) -> Engine:
    return decode_step.engine_of(_shapes(options, options.method), options, variant, group)


def _text_engine(
    options: lossless.Options, variant: Variant, concurrencies: tuple[int, ...]
) -> Engine:
    models = replace(_shapes(options, options.methods), activations=options.activations)
    cells = lossless.cells_of(options, list(models.heads))
    prompts = lossless.random_texts(options).prompts(lossless.num_prompts(options, cells))
    config = lossless.config_of(options, prompts, concurrencies)
    width = min(config.max_model_len, models.target.config.max_position)
    texts = jax.ShapeDtypeStruct((len(prompts), width), jnp.int32)
    return lossless.engine_of(models, variant, config, texts)


@cache
def _shapes(options: decode_step.Options | lossless.Options, methods: tuple[str, ...]) -> Shapes:
    return Shapes.of(
        preset(options.preset, options.layers),
        methods,
        dtype=runs.choose_dtype(options.dtype),
        num_devices=options.tensor_parallel,
    )
