"""Bits of cached keys and values: pages that rounds wrote, beside pages of the same texts from prefill."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.timing import drive
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.request import Request
from peagle_jax.models.cache import LayerCache, PageCache
from peagle_jax.sampling_params import SamplingParams


class Place(NamedTuple):
    """Keys or values of a page in one layer."""

    model: str  # "target" or "drafter"
    text: int
    layer: int
    part: str  # "k" or "v"
    page: int  # of the text


@dataclass(frozen=True)
class WrittenPages:
    """Bits of the pages that hold output tokens only, each an unsigned array with a row for each position.

    Layers with a sliding window have no pages and are left out.
    """

    tokens: list[list[int]]
    pages: dict[Place, np.ndarray]

    def differing(self, other: "WrittenPages") -> list[str]:
        """The places that both have and that differ, each with the positions that do."""
        found = []
        for place, bits in self.pages.items():
            if place in other.pages:
                rows = np.flatnonzero((bits != other.pages[place]).any(axis=1))
                if rows.size:
                    at = " ".join(str(place.page * len(bits) + row) for row in rows)
                    where = f"layer {place.layer} {place.part} of text {place.text}"
                    found.append(f"{place.model} {where}: positions {at}")
        return found

    def count(self, model: str) -> int:
        """Number of places of the target or of the drafter."""
        return sum(place.model == model for place in self.pages)


def written_twice(
    engine: Engine, prompts: Sequence[list[int]], count: int
) -> tuple[WrittenPages, WrittenPages]:
    """Pages of outputs of `count` tokens, of all prompts at once: as rounds write them, then as prefill does."""
    engine.flush_prefix_cache()
    texts = _run(engine, prompts, count)
    by_rounds = _pages(engine, texts)
    engine.flush_prefix_cache()
    _run(engine, [text.tokens for text in texts], 1)
    by_prefill = _pages(engine, texts)
    return by_rounds, by_prefill


def _run(engine: Engine, prompts: Sequence[list[int]], count: int) -> list[Request]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return drive(engine, prompts, params, concurrency=len(prompts)).requests


def _pages(engine: Engine, texts: Sequence[Request]) -> WrittenPages:
    size, pool, state = engine.config.page_size, engine.scheduler.pool, engine._state
    caches = {"target": state.target_cache, "drafter": state.drafter_cache}
    pages: dict[Place, np.ndarray] = {}
    for number, text in enumerate(texts):
        first, stop = -(-len(text.prompt) // size), (text.num_tokens - 1) // size
        held, _ = pool.find(text.page_keys(size, stop), text.salt)
        assert len(held) == stop, f"{len(held)} of {stop} pages are cached"
        for model, cache in caches.items():
            for layer, part, bits in _bits(cache, np.array(held[first:], np.int32)):
                for page, rows in enumerate(bits, start=first):
                    pages[Place(model, number, layer, part, page)] = rows
        pool.release(held)
    return WrittenPages([text.tokens for text in texts], pages)


def _bits(cache: Sequence[LayerCache], pages: np.ndarray):
    """(layer, "k" or "v", [pages, positions, elements]) of the layers that have pages."""
    for number, layer in enumerate(cache):
        if isinstance(layer, PageCache):
            for part, values in zip("kv", layer, strict=True):
                found = np.asarray(values[pages])
                bits = found.view(f"uint{8 * found.itemsize}")
                yield number, part, bits.reshape(*bits.shape[:2], math.prod(bits.shape[2:]))
