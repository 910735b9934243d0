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


def fp8_scale(weight: jax.Array) -> jax.Array:
    """The scale of `quantize_fp8`, where the weight lies; for `fp8_values`."""
    largest = _largest(weight)
    return _divided(largest, jnp.full_like(largest, FP8_MAX))


@jax.jit
def _largest(weight: jax.Array) -> jax.Array:
    """[..., N, K] -> the largest magnitudes of its blocks, float32."""
    *leading, N, K = weight.shape
    ends = (*[(0, 0)] * len(leading), (0, -N % BLOCK), (0, -K % BLOCK))
    blocks = jnp.pad(weight, ends).reshape(*leading, -(-N // BLOCK), BLOCK, -(-K // BLOCK), BLOCK)
    return jnp.abs(blocks).max(axis=(-3, -1)).astype(jnp.float32)


# XLA makes a factor of a divisor that is one number, which rounds differently.
@jax.jit
def _divided(largest: jax.Array, by: jax.Array) -> jax.Array:
    return jnp.where(largest == 0, 1.0, jnp.maximum(largest / by, _SMALLEST))


@jax.jit
def fp8_values(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """The values of `quantize_fp8`, where the weight [..., N, K] lies; K is more than `BLOCK`.

    Args:
      scale: of `fp8_scale`. The two are programs of their own: in one, XLA may divide by other
        means.
    """
    scaled = weight.astype(jnp.float32) / spread(scale, *weight.shape[-2:])
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8)
