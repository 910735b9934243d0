"""Long work on the event loop in pieces: between two pieces all other requests have their turn.

A thread would not help. Python code in a thread holds the global interpreter lock for 5 ms at a time, so each
turn of the event loop would wait as long.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator

PIECE = 32
"""Items of a piece; one of a token with 20 alternatives takes about 50 us."""


async def pieces[T](items: Iterable[T], size: int = PIECE) -> AsyncIterator[list[T]]:
    """The items in lists of at most `size`. Each list is made in a turn of its own."""
    each = iter(items)
    while piece := list(itertools.islice(each, size)):
        yield piece
        await asyncio.sleep(0)


class Later[T]:
    """A list in the content of an answer whose items are made when they are encoded.

    Args:
      items: read once.
      count: number of the items.
    """

    def __init__(self, items: Iterable[T], count: int):
        self._items, self.count = items, count

    @property
    def is_long(self) -> bool:
        """Whether its items need several turns."""
        return self.count > PIECE

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def all(self) -> list[T]:
        """All items, also when it is called again."""
        self._items = list(self._items)
        return self._items
