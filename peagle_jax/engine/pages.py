"""The pool of KV pages: which page ids are free.

Pages are plain integers; what lies in them is the device's business (`peagle_jax.cache`). Page 0 is
the dummy page: padding rows and unmapped positions write there, so it is never handed out.
"""

from collections.abc import Iterable, Sequence

DUMMY_PAGE = 0


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was allocated."""


class PagePool:
    """Hands out page ids 1 .. num_pages-1, the most recently released first."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"{num_pages=} must be at least 2 (page 0 is the dummy page) and {page_size=} at least 1"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._is_free = bytearray([0] + [1] * (num_pages - 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold positions 0 .. num_positions-1: with 16 a page, 16 need 1 and 17 need 2."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages (0 is fine) or raises `OutOfPages` and takes none."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives `pages` back; a page that is not handed out is an error, not a second free copy."""
        for page in pages:
            if page == DUMMY_PAGE or self._is_free[page]:
                raise RuntimeError(f"page {page} is released but not handed out")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless the free pages and `owned` split the pool exactly.

        Args:
          owned: one list of page ids per owner.
        """
        holders = [*self._free]
        for pages in owned:
            holders.extend(pages)
        if DUMMY_PAGE in holders:
            raise AssertionError("the dummy page 0 is owned or free")
        if len(set(holders)) != len(holders):
            twice = sorted({page for page in holders if holders.count(page) > 1})
            raise AssertionError(f"pages with more than one owner: {twice}")
        leaked = sorted(set(range(1, self.num_pages)) - set(holders))
        if leaked:
            raise AssertionError(f"pages neither free nor owned: {leaked}")
        if len(holders) != self.num_pages - 1:
            raise AssertionError(f"{len(holders)} pages are held in a pool of {self.num_pages - 1}")
        if sum(self._is_free) != len(self._free):
            raise AssertionError("the free list and the free flags disagree")
