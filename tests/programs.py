"""Compiling less where a test is not about compiling.

Tracing and compiling the programs of one engine costs seconds of a core, running a tiny model costs
milliseconds. `one_bucket` compiles two programs instead of one for each batch bucket; `shared` lets
engines of equal shapes use the same programs.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import pytest

from peagle_jax import Engine, EngineConfig
from peagle_jax.engine.device.programs import Programs
from peagle_jax.method.verify import verify
from tests import tiny

_MOST_ENGINES = 12
"""Engines whose programs are kept. One takes about 2,000 of the 65,530 memory maps of a process."""

_compiled: OrderedDict[tuple, dict] = OrderedDict()


def one_bucket(engine: Engine) -> Engine:
    """The engine, with programs for prefill and its largest batch; smaller ones are padded."""
    engine.warm_up(sizes=[engine.config.batch_buckets[-1]])
    return engine


def small_engine(config: EngineConfig, **options) -> Engine:
    """An engine of a target of one layer and a head for it."""
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER)
    return Engine(tiny.target(**tiny.ONE_LAYER), head, config, **options)


@dataclass(frozen=True, kw_only=True)
class OneBucketConfig(EngineConfig):
    """One batch bucket: a server or a warm-up compiles one program of rounds."""

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        return (self.max_num_seqs,)


def _programs_of(target, drafter, config, taps, accept) -> dict:
    """Programs of engines with these shapes and static values, compiled by the first."""
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((target, drafter)))
    bare = jax.tree.map(lambda _: 0, target)
    bare.config = replace(bare.config, eos_ids=())
    # What only the host reads does not distinguish programs.
    config = replace(
        config,
        num_pages=config.total_pages,
        prefix_caching=True,
        max_waiting=1,
        programs_folder=None,
        prompt_logprobs=False,
    )
    key = (jax.tree.structure((bare, drafter)), shapes, config, taps, accept)
    programs = _compiled.setdefault(key, {})
    _compiled.move_to_end(key)
    while len(_compiled) > _MOST_ENGINES:
        _compiled.popitem(last=False)
    return programs


def _verify_unadjusted(logits, drafts, draft_probs, positions, params, adjustments=None):
    """The rule for requests that change no logits, compiled in two thirds of the time."""
    return verify(logits, drafts, draft_probs, positions, params)


_verify_unadjusted.program_key = "unadjusted"  # programs of tests may be kept on disk, too


@contextlib.contextmanager
def shared(*, controls: bool = True) -> Iterator[None]:
    """Within the block engines share programs. No test in it may change what a program computes.

    Args:
      controls: whether requests may have sampling controls, as `logit_bias`; else they are ignored.
    """
    init = Programs.__init__

    def make(self, target, drafter, config, *, taps, accept, **given):
        if accept is verify and not controls:
            accept = _verify_unadjusted
        init(self, target, drafter, config, taps=taps, accept=accept, **given)
        self._compiled = _programs_of(target, drafter, config, taps, accept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "__init__", make)
        yield
