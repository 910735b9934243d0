"""Quantises weights to block-scaled FP8 in the format of `pallas_kernels.formats`: on the host in
loading, and with the same bits where arrays of jax lie."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats import BLOCK, spread

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
_SMALLEST = np.finfo(np.float32).tiny


def quantize_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises blocks of 128 x 128 to e4m3 with a largest magnitude of 448: values * scale.

    The error of an element is at most 2^-4 of its magnitude, or 2^-10 of its block's scale if that
    is more. Works on 128 rows at a time, so a mapped checkpoint is never whole in float32.

    Args:
      weight: [..., outputs, inputs] of any floating dtype.
    Returns:
      (values float8_e4m3fn [..., outputs, inputs], scale float32 [..., ceil(outputs / 128),
      ceil(inputs / 128)]). The scale of an all-zero block is 1.
    Raises:
      ValueError: fewer than two axes, or a weight that is not finite.
    """
    if weight.ndim < 2:
        raise ValueError(f"a weight needs rows and columns: {weight.shape=}")
    *leading, outputs, inputs = weight.shape
    values = np.empty(weight.shape, FP8)
    scale = np.empty((*leading, -(-outputs // BLOCK), -(-inputs // BLOCK)), np.float32)
    for index in np.ndindex(*scale.shape[:-1]):
        *outer, block = index
        rows = (*outer, slice(block * BLOCK, (block + 1) * BLOCK))
        values[rows], scale[index] = _quantize_rows(weight[rows])
    return values, scale


def _quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Up to 128 rows [n, inputs] -> values [n, inputs], scale [ceil(inputs / 128)]."""
    wide = weight.astype(np.float32)
    inputs = wide.shape[1]
    largest = np.maximum.reduceat(np.abs(wide).max(axis=0), np.arange(0, inputs, BLOCK))
    if not np.isfinite(largest).all():
        raise ValueError("a weight is infinite or not a number; it has no fp8 form")
    # A subnormal scale would lose precision or be 0.
    scale = np.where(largest == 0, 1, np.maximum(largest / FP8_MAX, _SMALLEST)).astype(np.float32)
    scaled = wide / np.repeat(scale, BLOCK)[:inputs]
    # Rounding may push a quotient above 448, and casting that to e4m3fn gives NaN: clip.
    return _to_fp8(np.clip(scaled, -FP8_MAX, FP8_MAX)), scale


@functools.cache
def _fp8_table() -> np.ndarray:
    """Lookup table, uint8 [65536]: upper 16 bits of a float32 -> fp8 code."""
    floats = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    finite = np.where(np.abs(floats) <= FP8_MAX, floats, 0)
    return finite.astype(FP8).view(np.uint8)


def _to_fp8(x: np.ndarray) -> np.ndarray:
    """`x.astype(FP8)` for float32 of magnitude <= 448, round to nearest even, four times as fast.

    The upper 16 bits contain 7 mantissa bits and fp8 keeps 3. So the lower 16 bits matter only as a
    sticky bit, which separates an exact tie from more than half.
    """
    bits = x.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return _fp8_table()[upper].view(FP8)


@jax.jit
def fp8_scale(weight: jax.Array) -> jax.Array:
    """The scale of `quantize_fp8`, where the weight [..., N, K] lies."""
    *leading, N, K = weight.shape
    ends = (*[(0, 0)] * len(leading), (0, -N % BLOCK), (0, -K % BLOCK))
    blocks = jnp.pad(_magnitude(weight), ends)
    blocks = blocks.reshape(*leading, -(-N // BLOCK), BLOCK, -(-K // BLOCK), BLOCK)
    largest = blocks.max(axis=(-3, -1))
    by = np.float32(FP8_MAX).view(np.int32)
    significand, exponent = _quotient(largest, jnp.full_like(largest, by))
    scale = ((exponent - 1) << 23) + significand  # a significand of 2^24 adds one to the exponent
    scale = jnp.where(exponent < 1, _SMALLEST.view(np.int32), scale)
    scale = jnp.where(largest == 0, np.float32(1).view(np.int32), scale)
    return jax.lax.bitcast_convert_type(scale, jnp.float32)


@jax.jit
def fp8_values(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """The values of `quantize_fp8`, where the weight [..., N, K] lies.

    Args:
      scale: of `fp8_scale`.
    """
    by = spread(jax.lax.bitcast_convert_type(scale, jnp.int32), *weight.shape[-2:])
    significand, exponent = _quotient(_magnitude(weight), by)
    # A step is an eighth of the power of two, and 2^-9 below 2^-6: to the nearest, ties to even.
    dropped = jnp.clip(141 - exponent, 20, 31)
    half = (1 << (dropped - 1)) - 1 + ((significand >> dropped) & 1)
    code = ((significand + half) >> dropped) + 8 * (jnp.maximum(exponent, 121) - 121)
    code |= jnp.signbit(weight).astype(jnp.int32) << 7
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint8), FP8)


def _magnitude(weight: jax.Array) -> jax.Array:
    """|weight| as the bits of float32, int32: floats may lose subnormal numbers in comparisons."""
    return jax.lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.int32) & 0x7FFF_FFFF


def _quotient(over: jax.Array, by: jax.Array) -> tuple[jax.Array, jax.Array]:
    """over / by, rounded to the nearest float32: significand * 2^(exponent - 150).

    XLA's own quotient is off by up to two units in the last place on GPUs (PTX's `div.full.f32`),
    and loses subnormal numbers on CPUs. Here it is an estimate, off by two units in the last place:
    integers correct it. The remainder is below 2^31, so it is exact though its terms overflow. No
    quotient of two floats lies halfway between two others.

    Args:
      over, by: bits of floats, int32; `by` is normal.

    Returns:
      (the significand in [2^23, 2^24], or 0, int32; the exponent, int32). Below an exponent of 1,
      where float32 has fewer bits, the number is not rounded to them.
    """
    fraction, above = over & 0x7F_FFFF, over >> 23
    fraction = jnp.where(above > 0, fraction | 1 << 23, fraction)
    places = jax.lax.clz(fraction) - 8  # of a subnormal number
    divisor = (by & 0x7F_FFFF) | 1 << 23
    dividend = fraction << places
    is_less = (dividend < divisor).astype(jnp.int32)
    dividend <<= is_less
    exponent = jnp.maximum(above, 1) - places - (by >> 23) - is_less + 127
    estimate = jnp.divide(dividend.astype(jnp.float32), divisor.astype(jnp.float32))
    significand = (estimate * 2.0**23).astype(jnp.int32)
    rest = 2 * ((dividend << 23) - significand * divisor)
    for odd in range(-7, 8, 2):
        significand += (rest > odd * divisor).astype(jnp.int32)
    return significand - 4, exponent
