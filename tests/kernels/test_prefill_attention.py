"""Attention of many queries, whose row tiles share key blocks: the bits of one tile."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import H200
from pallas_kernels.verify_attention import mosaic_sm90, mosaic_sm100
from pallas_kernels.verify_attention.mosaic_plan import Splits
from tests.kernels.test_verify_attention_mosaic import CLOSE, Case, exactly, interpreted, kernel

pytestmark = pytest.mark.sampled(1)


@pytest.mark.sampled(1, slow=3)
@interpreted
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("case", "split"),
    [
        (Case((100,), T=19, K=1, G=7, H=128, Z=16, width=8), 64),
        # Three row tiles: the second thread block has one, and it is not full. Of six key blocks,
        # from two stages of e4m3 to two of bfloat16, each is refilled twice.
        (Case((330, 5), T=20, K=1, G=8, H=64, Z=16, width=24), 128),
        (Case((126,), T=40, K=2, G=4, H=128, Z=32, width=6, sinks=True), 128),
        (Case((250,), T=24, K=1, G=8, H=64, Z=16, width=12, window=150, sinks=True), 128),
        (Case((0,), T=129, K=1, G=8, H=64, Z=16, width=16), 128),
        (Case((380, 0, 61), T=16, K=1, G=8, H=64, Z=64, width=8), Splits(((0, 64), (256, 128)))),
    ],
    ids=["seven-heads", "ragged", "sinks", "ring", "from-nothing", "growing-splits"],
)
def test_row_tiles_that_share_keys_have_the_bits_of_one(case, split, fp8):
    case = dataclasses.replace(case, fp8=fp8)
    q, k, v, *rest = case.inputs()
    run = functools.partial(kernel, mosaic_sm90, case, 1, split)
    shared = exactly(run(row_groups=2), q, k, v, *rest)
    np.testing.assert_array_equal(shared, exactly(run(), q, k, v, *rest))
    want = case.defined(q, k, v, *rest)
    np.testing.assert_allclose(shared.astype(jnp.float32), want, **CLOSE)
    # As rows that are decoded alone or verified.
    table, positions, sinks = rest
    last = exactly(run(), q[:, -1:], k, v, table, positions[:, -1:], sinks)
    np.testing.assert_array_equal(shared[:, -1:], last)


@interpreted
def test_keys_of_nan_past_a_row_change_no_bit_of_row_tiles_that_share_keys():
    """The first tile does not see the last key block, and reads it."""
    case = Case((48,), T=24, K=1, G=8, H=64, Z=16, width=8)
    q, k, v, table, positions, sinks = case.inputs()
    stale = np.asarray(table)[0, 4:]  # keys from 64 on, which queries 0 to 15 do not see
    marked = k.at[stale].set(jnp.nan)
    tiles = kernel(mosaic_sm90, case, 1, row_groups=2)
    run = lambda k: exactly(tiles, q, k, v, table, positions, sinks)
    want, found = (np.asarray(run(k), np.float32) for k in (k, marked))
    np.testing.assert_array_equal(found[:, :16], want[:, :16])
    assert np.isnan(found[:, 16:]).all()


@pytest.mark.parametrize(
    ("chip", "sizes", "walks", "message"),
    [
        (mosaic_sm90, {}, 2, "with 2 walks"),
        (mosaic_sm90, dict(H=256), 1, "with a head dim of 256"),
        (mosaic_sm100, {}, 1, "on this chip, which has at most 1"),
    ],
)
def test_row_tiles_share_no_keys_where_a_thread_block_cannot_hold_them(chip, sizes, walks, message):
    case = Case((70,), **dict(T=20, K=1, G=8, H=64, Z=16, width=8) | sizes)
    run = kernel(chip, case, walks, row_groups=2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, *case.inputs())


def test_calls_of_many_queries_over_many_keys_share_them_with_the_same_arithmetic():
    def chosen(batch, rows, positions=16384, heads=32, head_dim=128, fp8=False, window=None):
        shape, kv_heads = (batch, rows, heads, head_dim), heads // 8
        return mosaic_sm90.choose_config(shape, kv_heads, positions, window, H200, fp8)

    many = [chosen(1, 512), chosen(1, 4096, heads=64, head_dim=64), chosen(8, 512, 1024)]
    many += [chosen(1, 512, fp8=True), chosen(1, 512, heads=64, head_dim=64, fp8=True)]
    assert {config.row_groups for config in many} == {2}
    few = [
        chosen(128, 8),
        chosen(8, 8, fp8=True),
        chosen(8, 8),
        chosen(64, 14),
        chosen(1, 512, 576),
        chosen(4, 256),
    ]
    others = [chosen(1, 512, head_dim=256), chosen(1, 512, window=128)]
    assert {config.row_groups for config in few + others} == {1}
    arithmetic = lambda config: (config.key_block, config.splits)
    assert {*map(arithmetic, many)} == {*map(arithmetic, few)}
