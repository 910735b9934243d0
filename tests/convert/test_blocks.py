"""Blocks put together are the parameter, however small they are cut."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.blocks import blocks_of
from peagle_jax.checkpoint.layout import Rule
from peagle_jax.checkpoint.safetensors import TensorInfo
from peagle_jax.checkpoint.transforms import (
    Concat,
    Copy,
    Deinterleave,
    Merge,
    Scales,
    Stack,
    StackScales,
    Transpose,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
CASES = {
    "copy": (Copy(), [(7, 3, 2)]),
    "copy of a prime number of rows": (Copy(), [(101, 4)]),
    "copy of a vector": (Copy(), [(301,)]),
    "copy of a number": (Copy(), [()]),
    "copy of nothing": (Copy(), [(0, 4)]),
    "merge": (Merge(), [(1, 1, 40)]),
    "merge packed": (Merge(axes=2), [(6, 8, 3, 16)]),
    "merge of a number": (Merge(), [()]),
    "concatenate": (Concat(), [(8, 6), (3, 6), (5, 6)]),
    "concatenate with nothing": (Concat(), [(4, 6), (0, 6), (5, 6)]),
    "stack": (Stack(), [(4, 6)] * 5),
    "stack pairs": (Stack((2,)), [(4, 6)] * 10),
    "de-interleave": (Deinterleave(), [(5, 8, 3, 16)]),
    "de-interleave biases": (Deinterleave(), [(5, 8)]),
    "de-interleave columns": (Deinterleave(transposed=True), [(5, 6, 8)]),
    "transpose": (Transpose(), [(5, 6, 8)]),
    "scales": (Scales((256, 128, 100), 300), [(2, 3), (1, 3), (1, 3)]),
    "scales of rows": (Scales((100, 128), 300), [(100, 1), (1, 3)]),
    "scales of tensors": (Scales((10, 12), 64), [(), (1,)]),
    "scales of experts": (StackScales((2,), 200, 300), [(2, 3)] * 6),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_parameter_cut_along_its_first_axis(num_cases, case):
    @settings(
        max_examples=num_cases("parameters converted in blocks", 25),
        deadline=None,
        derandomize=True,
    )
    @given(limit=st.integers(1, 2000), dtype=st.sampled_from([np.dtype(np.uint8), BF16]))
    def check(limit, dtype):
        transform, shapes = CASES[case]
        rng = np.random.default_rng(0)
        parts, infos = {}, {}
        for i, shape in enumerate(shapes):
            size = int(np.prod(shape)) * dtype.itemsize
            parts[f"t{i}"] = np.frombuffer(rng.bytes(size), dtype).reshape(shape)
            infos[f"t{i}"] = TensorInfo(f"t{i}", dtype, shape, 1000, 1000 + size)
        want = np.ascontiguousarray(transform.join(list(parts.values())))
        want = want.reshape(transform.shape(shapes))
        blocks = blocks_of(Rule(("x",), tuple(parts), transform), infos, limit)
        assert (blocks.shape, blocks.dtype, blocks.nbytes) == (want.shape, want.dtype, want.nbytes)
        got, rows = bytearray(), 0
        for block in blocks:
            assert block.nbytes <= blocks.largest
            buffer = np.empty(blocks.largest, np.uint8)
            for piece in block.pieces:
                data = np.frombuffer(parts[piece.name].tobytes(), np.uint8)[piece.begin : piece.end]
                buffer[piece.offset : piece.offset + len(data)] = data
            made = block.make(buffer)
            assert made.flags.c_contiguous
            if block.index:
                assert made.shape == (block.index[0].stop - rows, *want.shape[1:])
                assert made.shape[0] <= blocks.step
                rows = block.index[0].stop
            got += made.tobytes()
        assert bytes(got) == want.tobytes()

    check()


def test_blocks_are_about_alike():
    info = TensorInfo("t", BF16, (128, 1000), 0, 256_000)
    steps = [blocks_of(Rule((), ("t",), Copy()), {"t": info}, n).step for n in (1, 10**5, 10**9)]
    assert steps == [1, 43, 128]  # 50 rows would fit: 43, 43, 42 is better than 50, 50, 28
