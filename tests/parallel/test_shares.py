"""How parameters are cut over devices, without any device."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from peagle_jax.config import ConfigError, ExpertsConfig
from peagle_jax.parallel.shares import (
    Cut,
    Part,
    check_shares,
    cut_of,
    local_attention,
    share_of,
    stored_attention,
    vocabulary_rows,
)
from tests import tiny

WIDE = replace(tiny.TARGET, num_heads=8, num_kv_heads=4, head_dim=128, intermediate_size=512)
QKV = ("layers", 1, "attention", "qkv")


def shares(array: np.ndarray, cut: Cut, count: int) -> list[list[int]]:
    return [share_of(array, cut, rank, count).tolist() for rank in range(count)]


def test_every_device_gets_its_heads_of_q_k_and_v():
    config = replace(tiny.TARGET, num_heads=4, num_kv_heads=2, head_dim=1)
    cut = cut_of(config, (*QKV, "bias"), (8,), (8,), 2)
    assert shares(np.arange(8), cut, 2) == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_a_head_of_keys_lies_on_all_devices_that_read_it():
    config = replace(tiny.TARGET, num_heads=4, num_kv_heads=2, head_dim=1)
    cut = cut_of(config, (*QKV, "bias"), (8,), (8,), 4)
    assert shares(np.arange(8), cut, 4) == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]
    attention = config.attention(0)
    assert local_attention(attention, 4).num_kv_heads == 1
    assert stored_attention(attention, 4).num_kv_heads == 4


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("vocab_size", [24, 33, 96, 128, 151936, 201088])
def test_every_row_of_the_vocabulary_lies_on_one_device(vocab_size, count):
    rows = vocabulary_rows(vocab_size, count)
    assert rows * count >= vocab_size
    assert rows <= 32 or rows % 32 == 0
    cut = Cut(0, (Part(vocab_size, 1),), rows)
    found = np.concatenate(
        [share_of(1 + np.arange(vocab_size), cut, d, count) for d in range(count)]
    )
    assert found[:vocab_size].tolist() == list(range(1, vocab_size + 1))
    assert not found[vocab_size:].any()
    assert len(found) == rows * count


@pytest.mark.parametrize(
    ("path", "shape", "scale", "axis"),
    [
        (QKV, (2048, 256), (16, 2), 0),
        (QKV, (2048, 256), (2048, 1), 0),
        (("layers", 0, "attention", "out"), (256, 1024), (2, 8), 1),
        (("layers", 0, "mlp", "gate_up"), (1024, 256), (8, 2), 0),
        (("layers", 0, "mlp", "down"), (256, 512), (2, 4), 1),
        (("layers", 0, "mlp", "down"), (4, 256, 512), (4, 2, 4), 0),
    ],
)
def test_scales_follow_the_blocks_of_their_weight(path, shape, scale, axis):
    """Each scale is the number of its block; after the cut every block still has its number."""
    weight_cut = cut_of(WIDE, (*path, "weight"), shape, shape, 4 if axis == 0 else 2)
    scale_cut = cut_of(WIDE, (*path, "scale"), scale, shape, 4 if axis == 0 else 2)
    count = 4 if axis == 0 else 2
    step = shape[axis] // scale[axis]
    along = lambda numbers, ndim: np.expand_dims(numbers, [i for i in range(ndim) if i != axis])
    blocks = np.arange(scale[axis])
    entries = along(np.repeat(blocks, step), len(shape))
    for rank in range(count):
        of_weight = share_of(entries, weight_cut, rank, count).ravel()
        of_scale = share_of(along(blocks, len(scale)), scale_cut, rank, count).ravel()
        assert of_weight.tolist() == np.repeat(of_scale, step).tolist()


def test_one_scale_for_all_columns_of_a_row_is_whole():
    path = ("layers", 0, "mlp", "down", "scale")
    assert cut_of(WIDE, path, (256, 1), (256, 512), 2) is None


@pytest.mark.parametrize(
    ("path", "shape", "scale", "count"),
    [
        (("layers", 0, "mlp", "down"), (256, 384), (2, 3), 2),
        (("layers", 0, "mlp", "gate_up"), (768, 256), (6, 2), 2),
        (QKV, (2048, 256), (16, 2), 8),
    ],
)
def test_a_block_with_one_scale_is_not_cut(path, shape, scale, count):
    config = replace(WIDE, head_dim=64, num_heads=16, num_kv_heads=8) if path == QKV else WIDE
    with pytest.raises(ConfigError, match=r"(mlp|qkv).*blocks of 128") as raised:
        cut_of(config, (*path, "scale"), scale, shape, count)
    assert raised.value.field == "tensor_parallel"


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        (dict(), 8, "the model has 4 query heads"),
        (dict(num_heads=12, num_kv_heads=3), 4, "the model has 3 key and value heads"),
        (dict(intermediate_size=49), 2, "the model has 49 columns in its MLP"),
        (dict(experts=ExpertsConfig(num_experts=6, top_k=2)), 4, "the model has 6 experts"),
        (
            dict(experts=ExpertsConfig(num_experts=8, top_k=2, dense_layers=(1,), dense_size=42)),
            4,
            "the model has 42 columns",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(changes, count, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check_shares(replace(tiny.TARGET, **changes), count)
    assert raised.value.field == "tensor_parallel"
    assert f"{count} devices" in str(raised.value)


def test_a_selector_is_whole_on_each_device():
    head = tiny.head("selector")
    for path, leaf in nnx.to_flat_state(nnx.state(head.selector)):
        assert cut_of(head.config, ("selector", *path), leaf.shape, leaf.shape, 2) is None


def test_a_head_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ConfigError, match="the draft head has 6 query heads"):
        check_shares(replace(tiny.HEAD, num_heads=6), 4)
