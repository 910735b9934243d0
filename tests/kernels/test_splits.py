"""Splits of attention, and how walks share them: numbers only, no kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import B200, H200, RTX5090
from pallas_kernels.verify_attention import mosaic_sm90, mosaic_sm100, mosaic_sm120
from pallas_kernels.verify_attention.mosaic_plan import (
    GROWING,
    UNIFORM,
    Splits,
    cut,
    longest_walk,
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


@pytest.mark.parametrize("keys", [1000, 16384, 65536, 131072])
@pytest.mark.parametrize("walks", [2, 8, 64, 66])
def test_a_walk_is_shorter_than_an_equal_part_and_a_split(keys, walks):
    longest = longest_walk(GROWING, keys, walks)
    assert keys / walks <= longest < keys / walks + GROWING.steps[-1][1]


LONG = [(1, 16384), (8, 16384), (1, 65536), (1, 131072)]
"""Sequences, and keys of each."""
CHIPS = {mosaic_sm90: (H200, 2), mosaic_sm100: (B200, 1), mosaic_sm120: (RTX5090, 2)}
"""Device, and thread blocks of a head dim of 128 that run on a multiprocessor at once."""


def schedule(chip, batch: int, keys: int, splits: Splits) -> tuple[int, int]:
    """(thread blocks, keys that one place of the chip visits), for Qwen3-MoE: 4 kv heads, 8 rows a sequence."""
    device, resident = CHIPS[chip]
    config = chip.choose_config((batch, 8, 32, 128), 4, keys, None, device, splits)
    assert config.splits == splits
    blocks = 4 * batch * config.walks
    waves = -(-blocks // (resident * device.num_sms))
    return blocks, waves * longest_walk(splits, keys, config.walks)


@pytest.mark.parametrize("chip", CHIPS, ids=["hopper", "blackwell", "rtx"])
@pytest.mark.parametrize(("batch", "keys"), LONG)
def test_no_schedule_is_longer_than_that_of_equal_splits_and_what_its_longest_split_adds(
    chip, batch, keys
):
    """A walk owns whole splits, so with one sequence a long split is what a growing rule costs."""
    _, uniform = schedule(chip, batch, keys, UNIFORM)
    blocks, growing = schedule(chip, batch, keys, GROWING)
    longest_split = keys - GROWING.first_of(GROWING.split_of(keys - 1))
    assert uniform <= growing <= max(1.25 * uniform, longest_split)
    if chip is mosaic_sm90 and (batch, keys) in ((8, 16384), (1, 131072)):
        assert (blocks, growing) == (256, uniform)  # nothing is lost


def test_growing_splits_leave_places_of_one_sequence_without_work():
    """On an H200; splits of 1,024 keys from position 4,096 on would leave 64 thread blocks, which take longer."""
    assert schedule(mosaic_sm90, 1, 16384, UNIFORM) == (256, 256)
    assert schedule(mosaic_sm90, 1, 16384, GROWING) == (128, 512)


def test_a_window_has_equal_splits():
    assert splits_of(None) == GROWING
    assert splits_of(1024) == UNIFORM
