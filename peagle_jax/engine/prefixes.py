"""The prefix cache as the scheduler uses it: which pages a request can take, and which it makes known.

A page whose positions are all final is published. Later requests with the same prefix take it and
prefill only what follows. Published pages are never written: a request writes at the end of its hit and
above, and a late write of an ended request lies at its length on the device or above.
"""

from typing import NamedTuple

from peagle_jax.config import EngineConfig
from peagle_jax.engine.pages import PagePool
from peagle_jax.engine.request import Request
from peagle_jax.engine.slots import FreeSlots


class Hit(NamedTuple):
    """A free slot, and the first pages of a request, which the caller holds; often an empty list."""

    slot: int
    pages: list[int]
    chain: list[int]  # numbers of the pages, see `PagePool`


class PrefixCache:
    """Finds and publishes pages, and counts tokens.

    Args:
      config: sizes of the engine; without `prefix_caching` nothing is found or published.
      pool: pages of the scheduler.
      free_slots: slots of the scheduler.
    """

    def __init__(self, config: EngineConfig, pool: PagePool, free_slots: FreeSlots):
        self._enabled = config.prefix_caching
        self._pool, self._free_slots = pool, free_slots
        self.num_queried = self.num_found = 0
        """Prompt tokens looked up when requests were first admitted, and those found."""

    def find(self, request: Request) -> Hit:
        """The longest cached prefix, and a free slot in which a request can go on from there.

        At least one token remains to be prefilled: its row gives the first token and the drafts.
        """
        pages, chain = [], []
        if self._enabled and request.reads_prefix_cache:
            size = self._pool.page_size
            keys = request.page_keys(size, (request.num_to_prefill - 1) // size)
            pages, chain = self._pool.find(keys, request.salt)
        slot, num_reusable = self._free_slots.choose(chain)
        self._pool.release(pages[num_reusable:])
        return Hit(slot, pages[:num_reusable], chain[:num_reusable])

    def count(self, request: Request) -> None:
        """Counts the hit of an admitted request. What it finds after a preemption is its own text."""
        if self._enabled and request.reads_prefix_cache and not request.preemptions:
            request.num_cached = request.num_prefilled
            self.num_queried += request.num_tokens
            self.num_found += request.num_cached

    def publish(self, request: Request, num_final: int) -> None:
        """Publishes the pages of a request below position `num_final`; their keys and values are final.

        A page is published together with the token after it, on which the drafter's keys depend.
        """
        size = self._pool.page_size
        count = min(num_final, request.num_tokens - 1) // size
        if self._enabled and len(request.chain) < count:
            keys = request.page_keys(size, count)
            for page in range(len(request.chain), count):
                self._pool.publish(request.pages[page], keys[page], request.chain, request.salt)
