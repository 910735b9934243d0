"""Transforms: `split` undoes `join` to the last bit, and every value lands where it belongs."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import formats
from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.checkpoint.transforms import (
    Concat,
    Copy,
    Deinterleave,
    Merge,
    Scales,
    Stack,
    StackScales,
    Transform,
    Transpose,
)

EXAMPLES = settings(deadline=None, derandomize=True)
FP8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(x) for x in (np.uint8, np.int64, np.float16, np.float32)] + [FP8, BF16]

sizes = st.integers(1, 5)
seeds = st.integers(0, 2**31)


def random_tensor(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bits at all: NaNs, infinities and negative zeros included."""
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(count), dtype).reshape(shape)


def check_round_trip(transform: Transform, parts: list[np.ndarray]) -> np.ndarray:
    joined = transform.join(parts)
    assert joined.shape == transform.shape([part.shape for part in parts])
    assert joined.dtype == parts[0].dtype
    for part, again in zip(parts, transform.split(joined, parts), strict=True):
        assert (again.shape, again.dtype) == (part.shape, part.dtype)
        assert np.ascontiguousarray(again).tobytes() == part.tobytes()
    return joined


def test_copy_and_merge_keep_every_bit(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(st.lists(sizes, min_size=1, max_size=4), st.sampled_from(DTYPES), seeds)
    def check(shape, dtype, seed):
        x = random_tensor(seed, tuple(shape), dtype)
        assert check_round_trip(Copy(), [x]) is x
        assert check_round_trip(Merge(), [x]).ndim == 1
        assert check_round_trip(Merge(axes=1), [x]).shape == x.shape

    check()


def test_a_scalar_becomes_a_vector_of_one():
    assert check_round_trip(Merge(), [np.array(3.5, np.float32)]).tolist() == [3.5]


def test_concatenated_rows_come_apart_again(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(st.lists(sizes, min_size=1, max_size=4), sizes, st.sampled_from(DTYPES), seeds)
    def check(rows, columns, dtype, seed):
        parts = [random_tensor(seed + i, (n, columns), dtype) for i, n in enumerate(rows)]
        joined = check_round_trip(Concat(), parts)
        assert joined[rows[0] - 1].tobytes() == parts[0][-1].tobytes()

    check()


def test_experts_are_stacked_in_order_and_any_run_of_them_alike(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(sizes, sizes, sizes, st.sampled_from([(), (2,)]), st.sampled_from(DTYPES), seeds)
    def check(E, F, D, group, dtype, seed):
        each = 2 if group else 1
        parts = [random_tensor(seed + i, (F, D), dtype) for i in range(E * each)]
        joined = check_round_trip(Stack(group), parts)
        assert joined.shape == (E, *group, F, D)
        assert joined[(E - 1, *(0 for _ in group))].tobytes() == parts[-each].tobytes()
        some = Stack(group).join(parts[each:]) if E > 1 else joined
        assert some.tobytes() == joined[min(1, E - 1) :].tobytes()

    check()


def test_interleaved_rows_are_gate_and_up(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(sizes, sizes, sizes, st.sampled_from(DTYPES), seeds)
    def check(E, F, G, dtype, seed):
        blocks = random_tensor(seed, (E, 2 * F, G, 16), dtype)
        joined = check_round_trip(Deinterleave(), [blocks])
        assert joined.shape == (E, 2, F, 16 * G)
        for half in (0, 1):
            want = np.ascontiguousarray(blocks[:, half::2].reshape(E, F, -1))
            assert np.ascontiguousarray(joined[:, half]).tobytes() == want.tobytes()
        # Scales and biases have fewer axes.
        assert check_round_trip(Deinterleave(), [blocks[..., 0]]).shape == (E, 2, F, G)
        assert check_round_trip(Deinterleave(), [blocks[..., 0, 0]]).shape == (E, 2, F)
        assert check_round_trip(Merge(axes=2), [blocks]).shape == (E, 2 * F, 16 * G)
        if E > 1:  # some experts of a tensor are joined as all of them
            assert Deinterleave().join([blocks[1:]]).tobytes() == joined[1:].tobytes()

    check()


def test_transposed_experts_turn_out_rows_first(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(sizes, sizes, sizes, st.sampled_from(DTYPES), seeds)
    def check(E, F, D, dtype, seed):
        gate_up = random_tensor(seed, (E, D, 2 * F), dtype)
        joined = check_round_trip(Deinterleave(transposed=True), [gate_up])
        assert joined.shape == (E, 2, F, D)
        assert joined[-1, 1, 0].tobytes() == gate_up[-1, :, 1].tobytes()
        down = random_tensor(seed + 1, (E, F, D), dtype)
        assert check_round_trip(Transpose(), [down])[0, -1].tobytes() == down[0, :, -1].tobytes()

    check()


def test_large_tensors_are_views_where_numpy_can_make_one():
    blocks = np.zeros((2, 6, 3, 16), np.uint8)
    for transform in (Copy(), Merge(axes=2), Deinterleave()):
        assert np.shares_memory(transform.join([blocks]), blocks)
    plain = np.zeros((2, 8, 6), np.float32)
    for transform in (Deinterleave(transposed=True), Transpose()):
        assert np.shares_memory(transform.join([plain]), plain)


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


def test_stacked_scales_mean_what_their_parts_meant(num_cases):
    @settings(EXAMPLES, max_examples=num_cases("tensors converted there and back", 60))
    @given(scales(matrices=1), st.integers(1, 3), st.sampled_from([(), (2,)]))
    def check(drawn, E, group):
        (n,), columns, (part,) = drawn
        count = E * (2 if group else 1)
        parts = [part * np.float32(2**i) for i in range(count)]
        joined = check_round_trip(StackScales(group, n, columns), parts)
        values = np.ones((E, *group, n, columns), FP8)
        each = formats.dequantize(values, joined, np.float32)
        want = np.stack([spread(part, n, columns) for part in parts]).reshape(values.shape)
        np.testing.assert_array_equal(each, want)

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
