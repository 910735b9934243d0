"""Splits long work on the event loop into pieces, between which the loop serves other requests.

A thread would not help: its Python code holds the global interpreter lock for 5 ms at a time, and
the event loop would wait as long for each of its callbacks.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator

PIECE = 32
"""Items of a piece; one of a token with 20 alternatives takes about 50 us."""


async def pieces[T](items: Iterable[T], size: int = PIECE) -> AsyncIterator[list[T]]:
    """The items in lists of at most `size`. The event loop runs other callbacks between
    two lists.
    """
    each = iter(items)
    while piece := list(itertools.islice(each, size)):
        yield piece
        await asyncio.sleep(0)


class Later[T]:
    """A list in the content of a JSON answer. Its items are created while the answer is encoded.

    Args:
      items: iterated once.
      count: number of items.
    """

    def __init__(self, items: Iterable[T], count: int):
        self._items, self.count = items, count

    @property
    def is_long(self) -> bool:
        """Whether the items are encoded in several pieces."""
        return self.count > PIECE

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def all(self) -> list[T]:
        """All items, as a list; it may be called again."""
        self._items = list(self._items)
        return self._items
