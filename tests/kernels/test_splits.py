"""Splits of attention, and how walks share them: numbers only, no kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.verify_attention.mosaic_plan import (
    GROWING,
    UNIFORM,
    Splits,
    cut,
    max_splits,
    splits_of,
)

SMALL = Splits(((0, 2), (4, 4), (16, 8)))
THREE = Splits(((0, 3),))
rules = pytest.mark.parametrize("splits", [SMALL, THREE, GROWING.in_blocks(64), GROWING])


def test_the_first_splits_are_those_of_the_rule():
    firsts = [GROWING.first_of(split) for split in (0, 1, 4, 5, 34, 35, 82, 83)]
    assert firsts == [0, 256, 1024, 1536, 16384, 17408, 65536, 67584]
    assert [SMALL.first_of(split) for split in range(8)] == [0, 2, 4, 8, 12, 16, 24, 32]
    counts = {keys: GROWING.split_of(keys - 1) + 1 for keys in (16384, 65536, 131072)}
    assert counts == {16384: 34, 65536: 82, 131072: 114}


@rules
def test_a_place_is_in_the_split_between_two_firsts(splits):
    split = -1
    for place in range(5 * splits.steps[-1][0] // 4 + 40):
        split += place == splits.first_of(split + 1)
        assert splits.split_of(place) == split
    assert split > 5


@rules
def test_kernels_compute_the_same_numbers(splits):
    """Traced int32, of which each thread of a kernel computes its own."""
    place = jnp.arange(3000, dtype=jnp.int32)
    wanted = [splits.split_of(int(i)) for i in place]
    np.testing.assert_array_equal(jax.jit(splits.split_of)(place), wanted)
    split = jnp.arange(100, dtype=jnp.int32)
    wanted = [splits.first_of(int(i)) for i in split]
    np.testing.assert_array_equal(jax.jit(splits.first_of)(split), wanted)
    first, end, index = (jnp.asarray(x, jnp.int32) for x in (5, 777, 3))
    traced = jax.jit(cut, static_argnums=(0, 3))(splits, first, end, 7, index)
    assert traced == cut(splits, 5, 777, 7, 3)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "begin at place 0"),
        (((1, 2),), "begin at place 0"),
        (((0, 4), (8, 2)), "ascend"),
        (((0, 2), (0, 4)), "ascend"),
        (((0, 2), (6, 4)), "multiple of 2 and divide 6"),
        (((0, 2), (6, 3)), "multiple of 2 and divide 6"),
    ],
)
def test_splits_that_do_not_nest_are_refused(steps, message):
    with pytest.raises(ValueError, match=message):
        Splits(steps)


@pytest.mark.sampled(6, slow=4)
@rules
@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_results_have_room_for_all_splits_that_a_tile_sees(splits, window):
    queries, table = 3, 100
    ends = range(queries - 1, table if window is None else 6 * splits.steps[-1][0] + 100)
    first = lambda last: 0 if window is None else max(0, last - (queries - 1) - (window - 1))
    seen = [splits.split_of(last) - splits.split_of(first(last)) + 1 for last in ends]
    assert max_splits(splits, table, window, queries) == max(seen)


@rules
@pytest.mark.parametrize("walks", [2, 3, 8, 66])
def test_walks_share_all_splits_in_order(splits, walks):
    size = splits.steps[-1][1]
    for first, end in ((0, 1), (0, 100 * size), (5, 6), (size + 1, 9 * size), (13, 40 * size + 3)):
        firsts = [cut(splits, first, end, walks, i) for i in range(walks)]
        assert firsts[0] == splits.split_of(first)
        assert firsts == sorted(firsts)
        assert firsts[-1] <= splits.split_of(end - 1)


def test_a_window_has_equal_splits():
    assert splits_of(None) == GROWING
    assert splits_of(1024) == UNIFORM
