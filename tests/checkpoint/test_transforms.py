"""Transforms: `split` undoes `join` to the last bit, and every value lands where it belongs."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import formats
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.transforms import (
    Scales,
    StackScales,
    Transform,
)

EXAMPLES = settings(deadline=None, derandomize=True)
FP8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)

seeds = st.integers(0, 2**31)


def check_round_trip(transform: Transform, parts: list[np.ndarray]) -> np.ndarray:
    joined = transform.join(parts)
    assert joined.shape == transform.shape([part.shape for part in parts])
    assert joined.dtype == parts[0].dtype
    for part, again in zip(parts, transform.split(joined, parts), strict=True):
        assert (again.shape, again.dtype) == (part.shape, part.dtype)
        assert np.ascontiguousarray(again).tobytes() == part.tobytes()
    return joined


@st.composite
def scales(draw, *, matrices: int | None = None):
    """Row counts, columns, and one scale of any known form for each matrix."""
    wide = st.one_of(st.integers(1, 300), st.sampled_from([128, 256, 384]))
    count = draw(st.integers(1, 3)) if matrices is None else matrices
    rows = tuple(draw(wide) for _ in range(count))
    columns = draw(wide)
    rng = np.random.default_rng(draw(seeds))
    parts = []
    for n in rows:
        blocks = (-(-n // 128), -(-columns // 128))
        form = draw(st.sampled_from([blocks, (n, 1), (n,), (1,), (1, 1), (), (n, blocks[1])]))
        parts.append(rng.uniform(0.1, 2, form).astype(np.float32))
    return rows, columns, parts


def spread(scale: np.ndarray, n: int, columns: int) -> np.ndarray:
    """The scale of each element, by the definitions of the file formats."""
    blocks = (-(-n // 128), -(-columns // 128))
    if scale.shape == blocks:
        return np.kron(scale, np.ones((128, 128), np.float32))[:n, :columns]
    if scale.shape == (n, blocks[1]):
        return np.repeat(scale, 128, axis=1)[:, :columns]
    return np.broadcast_to(scale.reshape(-1, 1), (n, columns))


def test_joined_scales_mean_what_their_parts_meant(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(scales())
    def check(drawn):
        rows, columns, parts = drawn
        joined = check_round_trip(Scales(rows, columns), parts)
        N = sum(rows)
        assert formats.kind(np.zeros((N, columns), FP8), joined) == "fp8"
        each = formats.dequantize(np.ones((N, columns), FP8), joined, np.float32)
        want = [spread(part, n, columns) for part, n in zip(parts, rows, strict=True)]
        np.testing.assert_array_equal(each, np.concatenate(want))

    check()


def test_stacked_scales_of_experts_mean_what_each_meant(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(scales(matrices=1), st.sampled_from([(), (2,)]))
    def check(drawn, group):
        (rows,), columns, (part,) = drawn
        experts = [np.asarray(part * factor) for factor in np.float32([1, 2, 3, 4])]
        joined = check_round_trip(StackScales(group, rows, columns), experts)
        for one, scale in zip(joined.reshape(4, *joined.shape[-2:]), experts, strict=True):
            each = formats.dequantize(np.ones((rows, columns), FP8), one, np.float32)
            np.testing.assert_array_equal(each, spread(scale, rows, columns))

    check()


def test_scales_of_whole_blocks_stay_blocks_and_others_get_a_row_each():
    assert Scales((4096, 512, 512), 2048).shape([(32, 16), (4, 16), (4, 16)]) == (40, 16)
    assert Scales((256, 100), 300).shape([(2, 3), (1, 3)]) == (3, 3)
    assert Scales((100, 256), 300).shape([(1, 3), (2, 3)]) == (356, 3)
    assert Scales((256, 256), 300).shape([(), ()]) == (512, 1)
    assert Scales((256,), 300).shape([(256, 1)]) == (256, 1)


def test_bfloat16_scales_survive_a_stay_in_float32():
    """As loaded: the parameter is float32, the file's scales are bfloat16."""
    part = np.random.default_rng(0).uniform(0.1, 2, (2, 3)).astype(BF16)
    transform = Scales((130,), 300)
    (again,) = transform.split(transform.join([part]).astype(np.float32), [part])
    assert again.dtype == BF16
    assert again.tobytes() == part.tobytes()


@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (301,), (3, 1), (2, 3, 1), (1, 3)])
def test_a_scale_that_fits_no_form_is_refused(shape):
    with pytest.raises(CheckpointError, match="does not fit a weight"):
        Scales((200,), 300).shape([shape])


def test_experts_with_scales_of_two_forms_are_refused():
    with pytest.raises(CheckpointError, match="different forms"):
        StackScales((), 256, 256).shape([(2, 2), (256, 1)])
