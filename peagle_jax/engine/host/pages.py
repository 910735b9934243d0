"""The allocator of KV pages: a free list of page ids, and the prefix cache.

The host handles page ids only; `peagle_jax.models.cache` holds the arrays. Page 0 is the dummy
page: padding rows and unmapped positions write there, so it is never allocated.

A page is *free*, *held* by one or more requests, or *idle*: no request holds it, but its contents
are known, so that a request with the same prefix can take it. The key of page i of a text is

    (number of page i-1, or the salt for i = 0;  tokens x_{iZ} .. x_{(i+1)Z}, Z+1 of them)

Numbers come from a counter and are never used again. So a key is exact: it names the whole text up
to token (i+1)Z, without a hash. The last of the Z+1 tokens belongs to the next page: the drafter's
entry at position p depends on x_{p+1}. When a page is forgotten, no key reaches the pages after it
any more.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

DUMMY_PAGE = 0

Salt = tuple[str | None, ...]
"""Texts with different salts share no pages."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than requested; nothing was allocated."""


class PagePool:
    """Allocates page ids 1 .. num_pages-1: free pages first, then the page that is idle the
    longest."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"{num_pages=} must be at least 2 (page 0 is the dummy page) and "
                f"{page_size=} at least 1"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._holders = [0] * num_pages
        self._idle: dict[int, None] = {}  # oldest first
        self._known: dict[tuple[int | Salt, bytes], int] = {}
        self._records: dict[int, tuple[tuple[int | Salt, bytes], int, Salt]] = {}
        """Key, number and salt of each known page."""
        self._numbers = itertools.count()
        self.num_changes = 0
        """Grows when pages are released or become known: a request that did not fit may fit now."""

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can hand out, idle pages included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Number of known pages that no request holds."""
        return len(self._idle)

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each page in the prefix cache, held or idle."""
        return {page: number for page, (_, number, _) in self._records.items()}

    def pages_for(self, num_positions: int) -> int:
        """Number of pages for positions 0 .. num_positions-1: at page size 16, 16 need 1 and 17
        need 2."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages (0 is allowed); raises `OutOfPages` and allocates none if too
        few."""
        if count > self.num_free:
            raise OutOfPages(
                f"{count} pages asked for, {self.num_free} of {self.num_pages - 1} free"
            )
        while len(self._free) < count:
            self._forget(next(iter(self._idle)))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def find(self, keys: Iterable[bytes], salt: Salt) -> tuple[list[int], list[int]]:
        """Takes the known pages at the start of a text, up to the first one that is not known.

        Args:
          keys: the Z+1 tokens of each page of the text, see `Request.page_keys`.
          salt: must equal the salt of `publish`.

        Returns:
          The pages, to be released like allocated ones, and their numbers.
        """
        pages, chain = [], []
        parent: int | Salt = salt
        for key in keys:
            page = self._known.get((parent, key))
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            parent = self._records[page][1]
            pages.append(page)
            chain.append(parent)
        return pages, chain

    def publish(self, page: int, key: bytes, chain: list[int], salt: Salt) -> None:
        """Makes the next page of a text known and appends its number to `chain`.

        A text may be computed twice at once. Then the first page keeps the key, and the second
        stays unknown.

        Args:
          page: held by the caller; no later call writes to it.
          key: its Z+1 tokens.
          chain: numbers of the text's pages before it.
          salt: of the text.
        """
        whole = (chain[-1] if chain else salt, key)
        known = self._known.get(whole)
        if known is None:
            number = next(self._numbers)
            self._known[whole] = page
            self._records[page] = (whole, number, salt)
            self.num_changes += 1
        else:
            number = self._records[known][1]
        chain.append(number)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up `pages`, those of one text in its order. The last of them is forgotten first.

        Raises:
          RuntimeError: no request holds a page (double free).
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} is released but not handed out")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._records:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        self.num_changes += len(pages)

    def flush(self, salt: Salt = ()) -> int:
        """Forgets the idle pages whose salt begins with `salt`, and returns their number."""
        pages = [page for page in self._idle if self._records[page][2][: len(salt)] == salt]
        for page in pages:
            self._forget(page)
        return len(pages)

    def _forget(self, page: int) -> None:
        """Moves an idle page to the free list."""
        del self._idle[page]
        key, _, _ = self._records.pop(page)
        del self._known[key]
        self._free.append(page)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless every page is free, idle, or held as often as `owned`
        names it.

        Args:
          owned: one list of page ids per owner.
        """
        held: Counter[int] = Counter()
        for pages in owned:
            if len(set(pages)) != len(pages):
                raise AssertionError(f"an owner holds a page twice: {pages}")
            held.update(pages)
        if DUMMY_PAGE in held or DUMMY_PAGE in self._free or DUMMY_PAGE in self._idle:
            raise AssertionError("the dummy page 0 is owned or free")
        for page, holders in held.items():
            if not 0 < page < self.num_pages:
                raise AssertionError(f"page {page} is not in a pool of {self.num_pages - 1}")
            if holders != self._holders[page]:
                raise AssertionError(
                    f"page {page} has {holders} owners and counts {self._holders[page]}"
                )
        unheld = [*self._free, *self._idle]
        if sorted([*unheld, *held]) != list(range(1, self.num_pages)):
            raise AssertionError("a page is neither free, idle nor owned, or two of these")
        if any(self._holders[page] for page in unheld):
            raise AssertionError("a page without an owner counts owners")
        records = {page: record[0] for page, record in self._records.items()}
        if records != {page: key for key, page in self._known.items()}:
            raise AssertionError("pages and keys of the prefix cache disagree")
        if not set(self._idle) <= set(records) or set(self._free) & set(records):
            raise AssertionError("an idle page is unknown, or a free page is known")
