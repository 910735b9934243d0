"""Quantised weights against definitions written here, code by code, in plain numpy."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.formats import dequantize, kind, logical_shape

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BYTES = np.arange(256, dtype=np.uint8)
unpack = jax.jit(dequantize, static_argnums=2)


def e4m3(code: int) -> float:
    """Sign, four bits of exponent, three of mantissa; all ones is NaN and there is no infinity."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def fp8_values(rng, shape) -> np.ndarray:
    """Random finite codes."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


def same_bits(a, b) -> bool:
    """Equal as bits, so that -0 differs from 0; one NaN is as good as another."""
    a, b = np.asarray(a), np.asarray(b)
    bits = f"u{a.itemsize}"
    nan = np.isnan(a) & np.isnan(b)
    return a.dtype == b.dtype and ((a.view(bits) == b.view(bits)) | nan).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_mxfp4_byte_under_every_scale_is_exact(dtype):
    """Subnormals (2^-128 is the least), overflow to infinity and the NaN scale included."""
    values = np.broadcast_to(BYTES[None, :, None], (256, 256, 16))
    scale = np.broadcast_to(BYTES[:, None, None], (256, 256, 1))
    signed = np.array([*E2M1, *(-np.array(E2M1))])
    wanted = np.stack([signed[BYTES & 15], signed[BYTES >> 4]], axis=-1)
    powers = np.where(BYTES == 255, np.nan, 2.0 ** (BYTES.astype(np.float64) - 127))
    with np.errstate(over="ignore"):  # 3 * 2^127 has no float32
        wanted = (powers[:, None, None] * wanted).astype(np.float32).astype(dtype)
    found = dequantize(jnp.asarray(values), jnp.asarray(scale), jnp.dtype(dtype))
    assert found.shape == (256, 256, 32)
    assert same_bits(found[..., :2], wanted)
    assert same_bits(found[..., 30:], wanted)


def test_mxfp4_has_the_low_nibble_first_and_a_scale_for_each_32():
    values = np.zeros((1, 32), np.uint8)
    values[0, 0] = 0x92  # low nibble 2 is 1, high nibble 9 is -0.5
    values[0, 16] = 0x07
    scale = jnp.array([[127, 130]], jnp.uint8)
    found = np.asarray(dequantize(jnp.asarray(values), scale, jnp.float32))[0]
    assert found[[0, 1, 32]].tolist() == [1.0, -0.5, 48.0]
    assert np.count_nonzero(found) == 3


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3.4e5, 1.2e-30])
def test_every_fp8_byte_is_its_value_times_the_scale(scale):
    values = jnp.asarray(BYTES.view(ml_dtypes.float8_e4m3fn).reshape(2, 128))
    scale = np.float32(scale)
    wanted = np.array([e4m3(code) for code in range(256)]).reshape(2, 128) * np.float64(scale)
    found = dequantize(values, jnp.full((1, 1), scale), jnp.float32)
    assert same_bits(found, wanted.astype(np.float32))


def test_fp8_scales_cover_blocks_or_rows_of_any_shape(num_cases):
    """Each element is looked up by its own row and column, ragged last blocks included."""

    @settings(deadline=None, max_examples=num_cases("unpacked FP8 and MXFP4 weights", 15))
    @given(data=st.data())
    def check(data):
        leading = data.draw(st.sampled_from([(), (2,), (2, 3)]))
        N, K = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
        rows = data.draw(st.sampled_from([1, 128])) if N > 1 else 128
        columns = data.draw(st.sampled_from([128, 1000]))
        rng = np.random.default_rng(N * K)
        values = fp8_values(rng, (*leading, N, K))
        sizes = (N if rows == 1 else -(-N // 128), 1 if columns == 1000 else -(-K // 128))
        scale = rng.uniform(0.5, 2, (*leading, *sizes)).astype(np.float32)
        spread = scale[..., np.arange(N)[:, None] // rows, np.arange(K) // columns]
        assert kind(values, scale) == "fp8"
        assert logical_shape(values, scale) == (*leading, N, K)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            found = unpack(jnp.asarray(values), jnp.asarray(scale), jnp.dtype(dtype))
            assert same_bits(found, (values.astype(np.float32) * spread).astype(dtype))

    check()


def test_a_plain_weight_is_cast():
    weight = jnp.linspace(-1, 1, 12).reshape(3, 4)
    assert kind(weight, None) == "plain"
    assert logical_shape(weight, None) == (3, 4)
    assert dequantize(weight, None, jnp.bfloat16).dtype == jnp.bfloat16
    assert same_bits(dequantize(weight, None, jnp.float32), weight)


FP8, U8, F32, BF16 = jnp.float8_e4m3fn, jnp.uint8, jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    ("values", "scale", "says"),
    [
        (((8, 8), FP8), None, "without a scale"),
        (((8, 8), F32), ((1, 1), F32), "with a scale"),
        (((8, 8), jnp.float8_e5m2), ((1, 1), F32), "with a scale"),
        (((8, 8), FP8), ((1, 1), BF16), "float32 scale"),
        (((8, 16), U8), ((8, 1), F32), "uint8"),
        (((8, 20), U8), ((8, 1), U8), "groups of 16 bytes"),
        (((8, 32), U8), ((8, 1), U8), "must be [8, 2]"),
        (((300, 300), FP8), ((2, 3), F32), "must be [3 or 300, 1 or 3]"),
        (((2, 8, 8), FP8), ((1, 1), F32), "must be [2, 1 or 8, 1]"),
        (((8,), FP8), ((1,), F32), "rows and columns"),
    ],
)
def test_combinations_of_no_format_are_refused(values, scale, says):
    values = jax.ShapeDtypeStruct(*values)
    scale = None if scale is None else jax.ShapeDtypeStruct(*scale)
    with pytest.raises(ValueError, match=re.escape(says)):
        kind(values, scale)
