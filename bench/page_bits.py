"""Bits of cached keys and values: pages that rounds wrote, beside pages of the same text from prefill."""

from dataclasses import dataclass

import numpy as np

from bench.timing import drive
from peagle_jax.cache import LayerCache, PageCache
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.request import Request
from peagle_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class WrittenPages:
    """Bytes of the pages that hold output tokens only: one array for each page and layer.

    Layers with a sliding window have no pages and are left out.
    """

    tokens: list[int]
    target: list[bytes]
    drafter: list[bytes]

    def num_differing(self, other: "WrittenPages") -> int:
        """Arrays of the target, and of the drafter where both have one, that differ."""
        pairs = [(self.target, other.target)]
        if self.drafter and other.drafter:
            pairs.append((self.drafter, other.drafter))
        return sum(a != b for one, two in pairs for a, b in zip(one, two, strict=True))


def written_twice(
    engine: Engine, prompt: list[int], count: int
) -> tuple[WrittenPages, WrittenPages]:
    """Pages of an output of `count` tokens: as rounds write them, then as prefill writes them."""
    engine.flush_prefix_cache()
    text = _run(engine, prompt, count)
    by_rounds = _pages(engine, text)
    engine.flush_prefix_cache()
    _run(engine, text.tokens, 1)
    by_prefill = _pages(engine, text)
    return by_rounds, by_prefill


def _run(engine: Engine, prompt: list[int], count: int) -> Request:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return drive(engine, [prompt], params, concurrency=1).requests[0]


def _pages(engine: Engine, text: Request) -> WrittenPages:
    size, pool = engine.config.page_size, engine.scheduler.pool
    first, stop = -(-len(text.prompt) // size), (text.num_tokens - 1) // size
    held, _ = pool.find(text.page_keys(size, stop), text.salt)
    assert len(held) == stop, f"{len(held)} of {stop} pages are cached"
    state, pages = engine._state, np.array(held[first:], np.int32)
    found = WrittenPages(
        text.tokens, _bytes(state.target_cache, pages), _bytes(state.drafter_cache, pages)
    )
    pool.release(held)
    return found


def _bytes(cache: list[LayerCache], pages: np.ndarray) -> list[bytes]:
    layers = [np.asarray(x[pages]) for one in cache if isinstance(one, PageCache) for x in one]
    return [page.tobytes() for layer in layers for page in layer]
