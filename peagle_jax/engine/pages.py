"""The allocator of KV pages: a free list of page ids.

The host handles page ids only; `peagle_jax.cache` holds the arrays. Page 0 is the dummy page: padding
rows and unmapped positions write there, so it is never allocated.
"""

from collections.abc import Iterable, Sequence

DUMMY_PAGE = 0


class OutOfPages(RuntimeError):
    """Fewer pages are free than requested; nothing was allocated."""


class PagePool:
    """Allocates page ids 1 .. num_pages-1, last released first (LIFO)."""

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
        """Number of pages for positions 0 .. num_positions-1: at page size 16, 16 need 1 and 17 need 2."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages (0 is allowed); raises `OutOfPages` and allocates none if too few."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Frees `pages`. Freeing a page that is not allocated raises `RuntimeError` (double free)."""
        for page in pages:
            if page == DUMMY_PAGE or self._is_free[page]:
                raise RuntimeError(f"page {page} is released but not handed out")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless every page is either free or in exactly one list of `owned`.

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
