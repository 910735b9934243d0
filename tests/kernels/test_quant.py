"""Quantising on the host: how far off an element may be, and what a tensor costs in memory."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.formats import dequantize, kind
from peagle_jax.models.quant import FP8_MAX, fp8_scale, fp8_values, quantize_fp8


def unpack(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(dequantize(jnp.asarray(values), jnp.asarray(scale), jnp.float32))


def scale_of_each(weight: np.ndarray) -> np.ndarray:
    """max |w| / 448 of each element's block of 128 x 128, in float64."""
    N, K = weight.shape
    out = np.empty((N, K))
    for i in range(0, N, 128):
        for j in range(0, K, 128):
            block = (slice(i, i + 128), slice(j, j + 128))
            out[block] = np.abs(weight[block].astype(np.float64)).max() / FP8_MAX
    return out


def test_an_element_is_off_by_half_a_step_at_most(num_cases):
    """e4m3 has three bits of mantissa down to 2^-6, and steps of 2^-9 below."""

    @settings(deadline=None, max_examples=num_cases("weights quantised to FP8", 30))
    @given(
        N=st.integers(1, 300),
        K=st.integers(1, 300),
        power=st.integers(-30, 30),
        dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    )
    def check(N, K, power, dtype):
        rng = np.random.default_rng(N * K)
        weight = (rng.standard_t(3, (N, K)) * 2.0**power).astype(dtype)
        values, scale = quantize_fp8(weight)
        assert kind(values, scale) == "fp8"
        assert scale.shape == (-(-N // 128), -(-K // 128))
        wide, step = weight.astype(np.float64), scale_of_each(weight)
        bound = np.maximum(2.0**-4 * np.abs(wide), 2.0**-10 * step) * (1 + 1e-6)
        assert (np.abs(unpack(values, scale) - wide) <= bound).all()

    check()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_quantising_what_was_quantised_changes_nothing(dtype):
    """Values stay bit for bit; a scale may move by the rounding of the dtype between."""
    weight = np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32)
    values, scale = quantize_fp8(weight)
    again, scale_again = quantize_fp8(unpack(values, scale).astype(dtype))
    assert np.array_equal(again.view(np.uint8), values.view(np.uint8))
    eps = np.finfo(np.float32).eps if dtype == np.float32 else 2.0**-8
    assert np.allclose(scale_again, scale, rtol=eps, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(3, 130, 257), (128, 256), (1, 129), (2, 40, 64)])
@pytest.mark.parametrize("power", [0, -120])
def test_arrays_of_jax_get_the_bits_of_the_host(shape, dtype, power):
    """Subnormal numbers too, which XLA's floats lose on a CPU."""
    sizes = 2.0 ** np.random.default_rng(1).integers(-40, 9, shape) * 2.0**power
    weight = (np.random.default_rng(0).standard_t(3, shape) * sizes).astype(jnp.dtype(dtype))
    weight[0] *= 0
    values, scale = quantize_fp8(weight)
    there = jnp.asarray(weight)
    assert np.asarray(fp8_scale(there)).tobytes() == scale.tobytes()
    assert np.asarray(fp8_values(there, fp8_scale(there))).tobytes() == values.tobytes()


@pytest.mark.parametrize("units", range(-3, 4))
def test_a_quotient_of_arrays_of_jax_is_rounded_whatever_the_estimate(units, monkeypatch):
    """XLA's quotient is off by up to two units in the last place on GPUs; here by `units`."""
    divide = jnp.divide
    codes = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    points = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    rng = np.random.default_rng(0)
    scale = (rng.random((4, 16)) + 1).astype(np.float32)
    each = np.repeat(np.repeat(scale, 128, 0), 128, 1)
    near = (rng.choice(points, each.shape) * each).astype(np.float32)  # to where rounding changes
    near = (near.view(np.int32) + rng.integers(-2, 3, near.shape, np.int32)).view(np.float32)
    wanted = np.clip(near / each, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    monkeypatch.setattr(jnp, "divide", lambda *two: divide(*two) + units * 2.0**-23)
    found = jax.jit(lambda *two: fp8_values.__wrapped__(*two))(near, scale)  # traced anew
    assert np.asarray(found).tobytes() == wanted.tobytes()


def test_rounding_is_that_of_ml_dtypes():
    """Random floats of every size, the codes themselves, what lies between two, and
    next to that.
    """
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    between = (codes[1:] + codes[:-1]) / 2
    near = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    floats = np.concatenate([floats, codes, between, *near])
    floats = floats[np.abs(floats) <= FP8_MAX]
    floats = np.append(floats, np.zeros(-len(floats) % 127, np.float32)).reshape(-1, 127)
    floats = np.pad(floats, ((0, 0), (0, 1)), constant_values=FP8_MAX)  # so that each scale is 1
    values, scale = quantize_fp8(floats)
    assert (scale == 1).all()
    wanted = floats.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(values.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 1e-36, 3e38])
def test_the_ends_of_float32_stay_finite(largest):
    weight = np.full((3, 3), largest, np.float32)
    values, scale = quantize_fp8(weight)
    assert (scale >= np.finfo(np.float32).tiny).all()
    back = values.astype(np.float64) * np.float64(scale[0, 0])
    assert (np.abs(back - weight) <= np.maximum(weight / 16, scale[0, 0] / 1024)).all()


def test_a_big_tensor_is_never_held_in_float32():
    weight = np.ones((4096, 512), ml_dtypes.bfloat16)
    weight.flags.writeable = False  # as a mapped checkpoint is
    tracemalloc.start()
    try:
        values, scale = quantize_fp8(weight)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rows = 128 * 512 * 4
    assert peak <= values.nbytes + scale.nbytes + 8 * rows
    assert peak < 4 * weight.size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_no_numbers_are_refused(bad, dtype):
    weight = np.ones((130, 130), dtype)
    weight[129, 3] = bad
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantize_fp8(weight)
