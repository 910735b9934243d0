"""The prefix cache as the scheduler uses it: which pages a request can take, and which it makes
known.

A page whose positions are all final is published. Later requests with the same prefix take it and
prefill only what follows. Published pages are never written: a request writes at the end of its hit
and above, and a late write of an ended request lies at its length on the device or above.

A request may arrive while an earlier one, its *leader*, still computes a prefix that both share. It
then gets a slot, and pages only when the leader's are published.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.pages import PagePool
from peagle_jax.engine.host.request import Request, RequestState, RingCopy
from peagle_jax.engine.host.slots import FreeSlots, Reach, SavedRings

_LEAST_OF_PROMPT = 64
"""Tokens that make it worth for an answer to wait for the prefill of another one of its prompt."""


class Hit(NamedTuple):
    """The first pages of a request, which the caller holds, and rings that continue them."""

    slot: int
    saved: int | None  # the row of the saved rings to copy to the slot; None: the slot has them
    pages: list[int]
    chain: list[int]  # numbers of the pages, see `PagePool`
    num_known: int  # number of known pages, with those that no rings continue


class PrefixCache:
    """Gives requests slots and pages, publishes pages, and counts tokens.

    Args:
      config: sizes of the engine; without `prefix_caching` nothing is found or published.
      pool: pages of the scheduler.
      windows: window sizes of all layers of target and drafter that have one.
    """

    def __init__(self, config: EngineConfig, pool: PagePool, windows: Collection[int]):
        reach = Reach(config, windows)
        self.free_slots = FreeSlots(config, reach)
        self.saved_rings = SavedRings(config, reach)
        self._config, self._pool = config, pool
        self._has_rings = reach.has_rings
        self._can_follow = config.prefix_caching and (not reach.has_rings or len(self.saved_rings))
        self.num_queried = self.num_found = 0
        """Prompt tokens looked up when requests were first admitted, and those found."""

    def admit(self, request: Request, num_pages: int, active: Iterable[Request]) -> bool:
        """Gives a request a free slot, and `num_pages` pages unless it has a leader among `active`.

        Returns False, and gives nothing, if the pool has too few pages.
        """
        hit = self._fitting(request, num_pages)
        if hit is None:
            return False
        written, request.slot = self.free_slots.take(hit.slot), hit.slot
        request.begun = False
        request.leader = self._leader(request, len(hit.pages), active)
        if request.leader is None:
            self._place(request, hit, written, num_pages)
        else:
            self._pool.release(hit.pages)
        return True

    def proceed(self, request: Request, num_pages: int) -> bool:
        """Whether an admitted request can be prefilled. Gives a follower its pages when its leader
        is done.

        If the pool has too few pages then, the request goes on waiting.
        """
        if request.pages:
            return True
        if request.leader is not None:
            leader, end = request.leader
            if leader.state is RequestState.PREFILL and leader.num_prefilled < end:
                return False
            request.leader = None
        hit = self._fitting(request, num_pages)
        if hit is not None:
            self._place(request, hit, 0, num_pages)
        return hit is not None

    def restores(self, active: Iterable[Request]) -> tuple[RingCopy, ...]:
        """Copies to make before the next prefill call, for the requests that were given pages."""
        requests = [request for request in active if request.restore is not None]
        copies = tuple(request.restore for request in requests)
        for request in requests:
            request.restore = None
        return copies

    def saves(self, request: Request, start: int) -> tuple[RingCopy, ...]:
        """Copies to make after a published prefill call of a request that began at position
        `start`."""
        size = self._pool.page_size
        ends = [end for end in request.save_at if start <= end * size <= request.num_prefilled]
        request.save_at.difference_update(ends)
        row = self.saved_rings.save(request.chain, request.written, ends)
        return () if row is None else (RingCopy(request.slot, row),)

    def publish(self, request: Request, num_final: int) -> None:
        """Publishes the pages of a request below position `num_final`; their keys and values are
        final.

        A page is published together with the token after it, on which the drafter's keys depend.
        """
        size = self._pool.page_size
        count = min(num_final, request.num_tokens - 1) // size
        if self._config.prefix_caching and len(request.chain) < count:
            keys = request.page_keys(size, count)
            for page in range(len(request.chain), count):
                self._pool.publish(request.pages[page], keys[page], request.chain, request.salt)

    def _fitting(self, request: Request, num_pages: int) -> Hit | None:
        """The cached prefix of the request, if the pool has the rest of `num_pages` pages."""
        hit = self._find(request)
        if num_pages - len(hit.pages) <= self._pool.num_free:
            return hit
        self._pool.release(hit.pages)
        return None

    def _find(self, request: Request) -> Hit:
        """The longest cached prefix from which the request can go on in its slot, or in a free one.

        At least one token remains to be prefilled: its row gives the first token and the drafts.
        """
        pages, chain = [], []
        if self._config.prefix_caching and request.reads_prefix_cache:
            size = self._pool.page_size
            keys = request.page_keys(size, (request.num_to_prefill - 1) // size)
            pages, chain = self._pool.find(keys, request.salt)
        if request.slot is None:
            slot, num_reusable = self.free_slots.choose(chain)
        else:
            slot, num_reusable = request.slot, 0 if self._has_rings else len(chain)
        saved, num_saved = self.saved_rings.choose(chain)
        if num_saved > num_reusable:
            slot = self.free_slots.oldest if request.slot is None else slot
            num_reusable = num_saved
        else:
            saved = None
        self._pool.release(pages[num_reusable:])
        return Hit(slot, saved, pages[:num_reusable], chain[:num_reusable], len(pages))

    def _leader(
        self, request: Request, num_cached: int, active: Iterable[Request]
    ) -> tuple[Request, int] | None:
        """The request whose pages are worth waiting for, and the position up to which it computes
        them.

        They save at least one prefill chunk, or of the same prompt `_LEAST_OF_PROMPT` tokens. Only
        requests of earlier rank lead, so nothing waits for a request that itself waits for a more
        urgent one.
        """
        if not (self._can_follow and request.reads_prefix_cache):
            return None
        size = self._pool.page_size
        keys = request.page_keys(size, (request.num_to_prefill - 1) // size)
        least = -(-self._config.prefill_chunk // size)
        least_of_prompt = min(least, -(-_LEAST_OF_PROMPT // size))
        best, most = None, num_cached
        for other in active:
            computes = other.state is RequestState.PREFILL and other.pages
            if not computes or other.salt != request.salt or other.rank > request.rank:
                continue
            num_others = min(len(keys), (other.num_to_prefill - 1) // size)
            others = other.page_keys(size, num_others)
            pairs = enumerate(zip(keys, others, strict=False))
            common = next((place for place, (a, b) in pairs if a != b), num_others)
            saved = least_of_prompt if other.prompt == request.prompt else least
            if common >= max(most + 1, num_cached + saved) and other.num_prefilled < common * size:
                best, most = other, common
        if best is None:
            return None
        best.save_at.add(most)
        return best, most * size

    def _place(self, request: Request, hit: Hit, written: int, num_pages: int) -> None:
        """Gives an admitted request what was found, and the pages that are missing."""
        size = self._pool.page_size
        if hit.saved is not None:
            written = self.saved_rings.restore(hit.saved)
            request.restore = RingCopy(hit.saved, hit.slot)
        request.written = written if hit.pages else 0
        request.chain = hit.chain
        request.pages = hit.pages + self._pool.allocate(num_pages - len(hit.pages))
        request.num_prefilled = len(hit.pages) * size
        # Where the text may be continued: at its end, and where it leaves an earlier text.
        request.save_at = {hit.num_known, (request.num_tokens - 1) // size} - {len(hit.pages)}
        if self._config.prefix_caching and request.reads_prefix_cache and not request.preemptions:
            # What a request finds after a preemption is its own text.
            request.num_cached = request.num_prefilled
            self.num_queried += request.num_tokens
            self.num_found += request.num_cached
