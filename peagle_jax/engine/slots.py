"""The free slots, and which prefixes their ring buffers still hold.

A layer with a sliding window keeps its keys and values in a ring of its slot, not in pages. Pages alone
therefore do not make a prefix of L tokens reusable there: every ring must still hold positions
L - window .. L-1. The ring of a freed slot does, until later positions overwrite them:

    |-- overwritten --|------------- ring: capacity positions --------------|
    0                 written - capacity                                    written

So a request that goes on where an earlier one ended, such as the next turn of a chat, takes that one's
slot. Without windows any slot will do.
"""

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from peagle_jax.config import EngineConfig


class _Content(NamedTuple):
    """What the rings of a free slot hold."""

    chain: Sequence[int]  # numbers of the text's pages, see `PagePool`
    written: int  # no call wrote a position of this text at or above it


class FreeSlots:
    """Free slots 0 .. max_num_seqs-1, the one that is free the longest first.

    Args:
      config: sizes of the engine.
      windows: window sizes of all layers of target and drafter that have one.
    """

    def __init__(self, config: EngineConfig, windows: Collection[int] = ()):
        self._page_size = config.page_size
        self._rings = {(config.ring_pages(window) * config.page_size, window) for window in windows}
        self._contents = dict.fromkeys(range(config.max_num_seqs), _Content((), 0))

    def __len__(self) -> int:
        return len(self._contents)

    def __iter__(self) -> Iterator[int]:
        return iter(self._contents)

    def choose(self, chain: Sequence[int]) -> tuple[int, int]:
        """The free slot that can reuse most of the pages `chain`, and how many of them it can."""
        if not self._rings or not chain:
            return next(iter(self._contents)), len(chain)
        reusable = {
            slot: self._reusable(content, chain) for slot, content in self._contents.items()
        }
        slot = max(reusable, key=reusable.__getitem__)
        return slot, reusable[slot]

    def take(self, slot: int) -> int:
        """Removes a free slot and returns its `written`, which still bounds what the rings hold."""
        return self._contents.pop(slot).written

    def release(self, slot: int, chain: Sequence[int], written: int) -> None:
        """Frees a slot whose rings hold the text of `chain`; see `_Content`."""
        assert slot not in self._contents, f"slot {slot} is free already"
        self._contents[slot] = _Content(tuple(chain) if self._rings else (), written)

    def _reusable(self, content: _Content, chain: Sequence[int]) -> int:
        """Number of pages of `chain` after which a request can go on in a slot with this content."""
        pages = range(min(len(content.chain), len(chain)))
        # A page's number names the text up to its end: where two chains part, they part for good.
        common = bisect.bisect_left(pages, True, key=lambda i: content.chain[i] != chain[i])
        length = common * self._page_size
        holds = all(
            content.written <= capacity or length - window >= content.written - capacity
            for capacity, window in self._rings
        )
        return common if holds else 0
