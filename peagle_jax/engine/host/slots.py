"""The free slots and the saved rings, and which prefixes they still hold.

A layer with a sliding window keeps its keys and values in a ring of its slot, not in pages. Pages
alone therefore do not make a prefix of L tokens reusable there: every ring must still hold
positions L - window .. L-1. The ring of a freed slot does, until later positions overwrite them:

    |-- overwritten --|------------- ring: capacity positions --------------|
    0                 written - capacity                                    written

So a request that goes on where an earlier one ended, such as the next turn of a chat, takes that
one's slot. A saved ring is a copy of a slot's rings at one moment. Any slot can start from it, so
it serves a beginning that many requests share. Without windows any slot will do, and nothing is
saved.
"""

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from peagle_jax.config import EngineConfig


class Content(NamedTuple):
    """The text whose window the rings of a free slot, or a saved copy, hold."""

    chain: Sequence[int]  # numbers of the text's pages, see `PagePool`
    written: int  # no call wrote a position of this text at or above it


class Reach:
    """How much of a text can be continued from a content.

    Args:
      config: sizes of the engine.
      windows: window sizes of all layers of target and drafter that have one.
    """

    def __init__(self, config: EngineConfig, windows: Collection[int]):
        self._page_size = config.page_size
        self._rings = {(config.ring_pages(window) * config.page_size, window) for window in windows}

    @property
    def has_rings(self) -> bool:
        return bool(self._rings)

    def reusable(self, content: Content, chain: Sequence[int]) -> int:
        """Number of pages of `chain` after which a request can go on with this content."""
        pages = range(min(len(content.chain), len(chain)))
        # A page's number names the text up to its end: where two chains part, they part for good.
        common = bisect.bisect_left(pages, True, key=lambda i: content.chain[i] != chain[i])
        length = common * self._page_size
        holds = all(
            content.written <= capacity or length - window >= content.written - capacity
            for capacity, window in self._rings
        )
        return common if holds else 0


class FreeSlots:
    """Free slots 0 .. max_num_seqs-1, the one that is free the longest first."""

    def __init__(self, config: EngineConfig, reach: Reach):
        self._reach = reach
        self._contents = dict.fromkeys(range(config.max_num_seqs), Content((), 0))

    def __len__(self) -> int:
        return len(self._contents)

    def __iter__(self) -> Iterator[int]:
        return iter(self._contents)

    @property
    def oldest(self) -> int:
        """The slot that is free the longest."""
        return next(iter(self._contents))

    def choose(self, chain: Sequence[int]) -> tuple[int, int]:
        """The free slot that can reuse most of the pages `chain`, and how many of them it can."""
        if not self._reach.has_rings or not chain:
            return self.oldest, len(chain)
        reusable = {
            slot: self._reach.reusable(content, chain) for slot, content in self._contents.items()
        }
        slot = max(reusable, key=reusable.__getitem__)
        return slot, reusable[slot]

    def take(self, slot: int) -> int:
        """Removes a free slot and returns its `written`, which still bounds what the rings hold."""
        return self._contents.pop(slot).written

    def release(self, slot: int, chain: Sequence[int], written: int) -> None:
        """Frees a slot whose rings hold the text of `chain`; see `Content`."""
        assert slot not in self._contents, f"slot {slot} is free already"
        self._contents[slot] = Content(tuple(chain) if self._reach.has_rings else (), written)


class SavedRings:
    """Copies of rings, the one that was used the longest ago first.

    On the device copy i lies behind the slots and the dummy slot, at row max_num_seqs + 1 + i.
    """

    def __init__(self, config: EngineConfig, reach: Reach):
        self._reach = reach
        first = config.max_num_seqs + 1
        rows = range(first, first + (config.saved_rings or 0)) if reach.has_rings else ()
        self._contents = dict.fromkeys(rows, Content((), 0))
        self.num_saved = self.num_restored = 0
        """Copies made, and copied back to slots, since the start."""

    def __len__(self) -> int:
        return len(self._contents)

    def choose(self, chain: Sequence[int]) -> tuple[int | None, int]:
        """The row of the copy that can reuse most of the pages `chain`, and how many of them it
        can."""
        reusable = {
            row: self._reach.reusable(content, chain) for row, content in self._contents.items()
        }
        row = max(reusable, key=reusable.__getitem__, default=None)
        return row, reusable.get(row, 0)

    def restore(self, row: int) -> int:
        """Marks a copy as used and returns its `written`; see `FreeSlots.take`."""
        self.num_restored += 1
        content = self._contents[row] = self._contents.pop(row)
        return content.written

    def save(self, chain: Sequence[int], written: int, ends: Iterable[int]) -> int | None:
        """The row for a copy of rings with this content, from which texts can go on after `ends`.

        Args:
          chain, written: see `Content`.
          ends: numbers of pages, at most those of `chain`.

        Returns:
          None if earlier copies serve all `ends`.
        """
        missing = False
        for end in ends:
            row, reusable = self.choose(chain[:end])
            if reusable == end:
                self._contents[row] = self._contents.pop(row)
            missing |= reusable < end
        if not missing or not self._contents:
            return None
        row = next(iter(self._contents))
        del self._contents[row]
        self._contents[row] = Content(tuple(chain), written)
        self.num_saved += 1
        return row
