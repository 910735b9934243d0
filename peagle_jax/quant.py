"""Quantises weights on the host: numpy in, numpy out, in the formats of `pallas_kernels.formats`."""

import functools

import ml_dtypes
import numpy as np

from pallas_kernels.formats import BLOCK

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
_SMALLEST = np.finfo(np.float32).tiny


def quantize_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 128 x 128 whose largest magnitude becomes 448; `values * scale` is the weight again.

    An element is off by at most 2^-4 of itself, or by 2^-10 of its block's scale if that is more. Works
    on 128 rows at a time, so a mapped checkpoint is never held in float32.

    Args:
      weight: [..., N, K] of any floating dtype.
    Returns:
      values float8_e4m3fn [..., N, K] and scale float32 [..., ceil(N / 128), ceil(K / 128)]; the scale
      of a block of zeros is 1.
    Raises:
      ValueError: fewer than two axes, or a weight that is not finite.
    """
    if weight.ndim < 2:
        raise ValueError(f"a weight needs rows and columns: {weight.shape=}")
    *leading, N, K = weight.shape
    values = np.empty(weight.shape, FP8)
    scale = np.empty((*leading, -(-N // BLOCK), -(-K // BLOCK)), np.float32)
    for index in np.ndindex(*scale.shape[:-1]):
        *outer, block = index
        rows = (*outer, slice(block * BLOCK, (block + 1) * BLOCK))
        values[rows], scale[index] = _quantize_rows(weight[rows])
    return values, scale


def _quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Up to 128 rows [n, K] -> values [n, K], scale [ceil(K / 128)]."""
    wide = weight.astype(np.float32)
    K = wide.shape[1]
    largest = np.maximum.reduceat(np.abs(wide).max(axis=0), np.arange(0, K, BLOCK))
    if not np.isfinite(largest).all():
        raise ValueError("a weight is infinite or not a number; it has no fp8 form")
    # A scale below the normal floats would lose its own precision, or be 0.
    scale = np.where(largest == 0, 1, np.maximum(largest / FP8_MAX, _SMALLEST)).astype(np.float32)
    scaled = wide / np.repeat(scale, BLOCK)[:K]
    # The quotient may exceed 448 by a rounding; e4m3fn has no infinity, its cast would give NaN.
    return _to_fp8(np.clip(scaled, -FP8_MAX, FP8_MAX)), scale


@functools.cache
def _rounded() -> np.ndarray:
    """fp8 code of the float32 that begins with each 16 bits, uint8 [65536]."""
    floats = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    finite = np.where(np.abs(floats) <= FP8_MAX, floats, 0)
    return finite.astype(FP8).view(np.uint8)


def _to_fp8(x: np.ndarray) -> np.ndarray:
    """x.astype(FP8) of float32 up to 448, to nearest even, in a quarter of the time of the cast.

    The upper 16 bits hold seven bits of mantissa where fp8 keeps three, so of the lower ones it only
    matters whether any is set: that decides between a half and more than a half.
    """
    bits = x.view(np.uint32)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return _rounded()[upper].view(FP8)
