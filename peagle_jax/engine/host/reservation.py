"""Pages that running requests hold: those of the calls in flight, and some ahead. No jax here.

    |-- committed: KV final --|-- J+1 a round in flight --|-- lookahead of the call --|-- ahead --|
    0                         known                       upper bound                 needed

all capped at max_model_len (the device drops writes beyond it). A plan is uploaded when its page
table has changed. So a request takes pages ahead, and keeps the same ones for many rounds, as long
as half of the pool is free, or while no other request waits for pages and a quarter is free without
counting cached prefixes.
"""

from peagle_jax.config import EngineConfig
from peagle_jax.engine.host.pages import PagePool
from peagle_jax.engine.host.request import Request

_AHEAD = 512
"""Positions."""


class Reservation:
    """Grows and trims the pages of requests.

    Args:
      config: sizes of the engine.
      pool: pages of the scheduler.
    """

    def __init__(self, config: EngineConfig, pool: PagePool):
        self._pool, self._most = pool, config.max_model_len
        self._per_round = config.num_draft + 1
        self._lookahead = config.lookahead + (config.repeat - 1) * self._per_round
        self.num_changes = 0
        """Grows when a running request has other pages than before."""

    def num_pages(self, positions: int) -> int:
        """Number of pages for `positions` plus the lookahead of a call that starts there."""
        return self._pool.pages_for(min(positions + self._lookahead, self._most))

    def upper_bound(self, request: Request) -> int:
        """Most positions that are final after the calls in flight."""
        return request.committed + request.rounds_in_flight * self._per_round

    def missing(self, request: Request) -> int:
        """Number of pages that one more call needs and the request lacks."""
        end = self.upper_bound(request) + self._lookahead  # of what the call writes
        request.writes_below(end)
        if end <= len(request.pages) * self._pool.page_size:
            return 0
        return max(0, self._pool.pages_for(min(end, self._most)) - len(request.pages))

    def grow(self, request: Request, missing: int, is_awaited: bool) -> None:
        """Allocates the missing pages, which must be free, and pages ahead.

        Args:
          is_awaited: whether another request waits for pages.
        """
        if missing:
            request.pages += self._pool.allocate(
                missing + self._ahead(request, missing, is_awaited)
            )
            self.num_changes += 1

    def trim(self, request: Request, is_awaited: bool) -> None:
        """Releases the pages that no call in flight needs, if too few are free; arguments as in
        `grow`."""
        if self._is_ample(self._pool.num_free, is_awaited):
            return
        needed = self.num_pages(self.upper_bound(request))
        if len(request.pages) > needed:
            self._pool.release(request.pages[needed:])
            del request.pages[needed:]
            self.num_changes += 1

    def _is_ample(self, num_free: int, is_awaited: bool) -> bool:
        """Whether a pool with `num_free` free pages has room for pages ahead."""
        most = self._pool.num_pages
        # Idle pages hold cached prefixes, which pages ahead must not evict.
        return 2 * num_free >= most or (
            not is_awaited and 4 * (num_free - self._pool.num_idle) >= most
        )

    def _ahead(self, request: Request, missing: int, is_awaited: bool) -> int:
        """Number of pages to take besides the missing ones: not beyond the end of the text."""
        held = len(request.pages) + missing
        end = self.num_pages(len(request.prompt) + request.params.max_tokens)
        ahead = max(0, min(self._pool.pages_for(_AHEAD), end - held))
        left = self._pool.num_free - missing - ahead
        return ahead if self._is_ample(left, is_awaited) else 0
