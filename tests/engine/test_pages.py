"""The page pool: nothing is lost, nothing has two owners, whatever the order of operations."""

import random

import pytest

from peagle_jax.engine.pages import DUMMY_PAGE, OutOfPages, PagePool


def test_every_page_but_the_dummy_is_handed_out_once():
    pool = PagePool(num_pages=9, page_size=4)
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert DUMMY_PAGE not in pages
    assert pool.num_free == 0
    pool.check_integrity([pages])


def test_a_refused_allocation_takes_nothing():
    pool = PagePool(num_pages=5, page_size=4)
    held = pool.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([held])


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_round_up(positions, pages):
    assert PagePool(num_pages=3, page_size=16).pages_for(positions) == pages


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
    with pytest.raises(AssertionError, match="more than one owner"):
        pool.check_integrity([a, b, a[:1]])
    with pytest.raises(AssertionError, match="neither free nor owned"):
        pool.check_integrity([a])
    with pytest.raises(AssertionError, match="dummy"):
        pool.check_integrity([a, b, [DUMMY_PAGE]])
    with pytest.raises(AssertionError, match="in a pool of"):
        pool.check_integrity([a, b, [99]])
    pool.check_integrity([a, b])


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
