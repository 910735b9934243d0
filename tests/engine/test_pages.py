"""The page pool: nothing is lost, nothing has two owners, whatever the order of operations."""

import random

import pytest

from peagle_jax.engine.host.pages import DUMMY_PAGE, OutOfPages, PagePool


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_pool_without_usable_pages_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="at least"):
        PagePool(num_pages, page_size)


def test_releasing_what_is_not_handed_out_is_an_error():
    pool = PagePool(num_pages=5, page_size=4)
    held = pool.allocate(2)
    pool.release(held)
    with pytest.raises(RuntimeError, match="not handed out"):
        pool.release(held)
    with pytest.raises(RuntimeError, match="not handed out"):
        pool.release([DUMMY_PAGE])
    assert pool.num_free == 4
    pool.check_integrity([])


def test_check_integrity_sees_each_kind_of_damage():
    pool = PagePool(num_pages=6, page_size=4)
    a, b = pool.allocate(2), pool.allocate(2)
    with pytest.raises(AssertionError, match="has 2 owners and counts 1"):
        pool.check_integrity([a, b, a[:1]])
    with pytest.raises(AssertionError, match="holds a page twice"):
        pool.check_integrity([a, b + b])
    with pytest.raises(AssertionError, match="neither free, idle nor owned"):
        pool.check_integrity([a])
    with pytest.raises(AssertionError, match="dummy"):
        pool.check_integrity([a, b, [DUMMY_PAGE]])
    with pytest.raises(AssertionError, match="not in a pool of"):
        pool.check_integrity([a, b, [99]])
    pool.check_integrity([a, b])


KEYS = [b"page 0", b"page 1", b"page 2"]


def published(pool: PagePool, keys=KEYS, salt=("salt",)) -> list[int]:
    """Allocates and publishes one page for each key."""
    pages, chain = pool.allocate(len(keys)), []
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key, chain, salt)
    return pages


def test_a_published_page_is_found_while_held_and_after():
    pool = PagePool(num_pages=9, page_size=4)
    first = published(pool)
    second, chain = pool.find(KEYS, ("salt",))
    assert (second, len(set(chain))) == (first, 3)
    assert pool.find(["page 1"], ("salt",)) == ([], []), "a page is known after those before it"
    assert pool.find(KEYS, ("other",)) == ([], [])
    assert pool.find([KEYS[0], b"another", KEYS[2]], ("salt",)) == (first[:1], chain[:1])
    pool.check_integrity([first, second, first[:1]])
    for held, num_free in ((first, 5), (second, 5), (first[:1], 7)):
        assert pool.num_free == num_free
        pool.release(held)
    assert pool.num_free == 8
    assert pool.find(KEYS, ("salt",)) == (first, chain)
    assert pool.num_free == 5
    pool.check_integrity([first])


def test_the_page_that_is_idle_the_longest_is_forgotten_first_and_a_text_from_its_end():
    pool = PagePool(num_pages=8, page_size=4)
    old, new = published(pool), published(pool, [b"x", b"y"])
    pool.release(old)
    pool.release(new)
    held = pool.allocate(2)  # these are free
    assert not set(held) & {*old, *new}
    held += pool.allocate(2)
    assert set(held[2:]) == {old[2], old[1]}
    assert pool.find(KEYS, ("salt",))[0] == old[:1]
    held += pool.allocate(2)
    assert set(held[4:]) == {new[1], new[0]}
    assert pool.find([b"x"], ("salt",)) == ([], [])
    pool.check_integrity([held, old[:1]])


def test_a_forgotten_page_takes_those_after_it_along():
    """The number of a page that is computed again is new, so no key reaches its old successors."""
    pool = PagePool(num_pages=9, page_size=4)
    first = published(pool)
    pages, chain = pool.find(KEYS[:2], ("salt",))
    (twin,) = pool.allocate(1)
    pool.publish(twin, b"page 2 of another text", chain, ("salt",))
    pool.release(first)
    pool.release([*pages, twin])
    assert pool.flush() == 4
    again = published(pool, KEYS[:1])
    assert pool.find(KEYS, ("salt",))[0] == again
    assert pool.num_free == 7


@pytest.mark.parametrize("seed", range(5))
def test_thousands_of_random_operations_keep_the_pool_whole(seed, num_cases):
    rng = random.Random(seed)
    pool = PagePool(num_pages=rng.randint(2, 40), page_size=rng.randint(1, 16))
    owned: list[list[int]] = []
    for _ in range(num_cases("operations on the page pool", 3000)):
        if owned and rng.random() < 0.5:
            pages = owned.pop(rng.randrange(len(owned)))
            keep = rng.randint(0, len(pages))
            pool.release(pages[keep:])
            if keep:
                owned.append(pages[:keep])
        else:
            count = rng.randint(0, 6)
            if count > pool.num_free:
                with pytest.raises(OutOfPages):
                    pool.allocate(count)
            else:
                owned.append(pool.allocate(count))
        assert pool.num_free + sum(map(len, owned)) == pool.num_pages - 1
    pool.check_integrity(owned)
