"""Compiling less where a test is not about compiling.

Tracing and compiling the programs of one engine costs seconds of a core, running a tiny model costs
milliseconds. `one_bucket` compiles two programs instead of one for each batch bucket; `shared` lets
engines of equal shapes use the same programs.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import jax
import pytest

from peagle_jax import Engine
from peagle_jax.engine.programs import Programs

_MOST_ENGINES = 8
"""Engines whose programs are kept. One takes about 2,000 of the 65,530 memory maps of a process."""

_compiled: OrderedDict[tuple, dict] = OrderedDict()


def one_bucket(engine: Engine) -> Engine:
    """The engine, with programs for prefill and for its largest batch; smaller batches are padded."""
    engine.warm_up(sizes=[engine.config.batch_buckets[-1]])
    return engine


def _programs_of(target, drafter, config, taps, accept) -> dict:
    """The programs of engines with these shapes and static values, which the first of them compiles."""
    leaves, structure = jax.tree.flatten((target, drafter))
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    key = (structure, shapes, config, taps, accept)
    programs = _compiled.setdefault(key, {})
    _compiled.move_to_end(key)
    while len(_compiled) > _MOST_ENGINES:
        _compiled.popitem(last=False)
    return programs


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Within the block engines share programs. No test in it may change what a program computes."""
    init = Programs.__init__

    def make(self, target, drafter, config, *, taps, accept):
        init(self, target, drafter, config, taps=taps, accept=accept)
        self._compiled = _programs_of(target, drafter, config, taps, accept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "__init__", make)
        yield
