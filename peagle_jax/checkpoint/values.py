"""Checks of weight values: counts NaN and infinity, refuses invalid quantisation scales."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from peagle_jax.checkpoint.safetensors import CheckpointError

MXFP4_NAN = 255
"""The scale byte 2^(s - 127) that means NaN."""


class _Bits(NamedTuple):
    """Bit patterns of a float dtype without the sign: >= `first` is not finite, `infinity` is
    infinity."""

    width: int  # bytes
    first: int
    infinity: int | None


_BITS = {
    np.dtype(np.float64): _Bits(8, 0x7FF0 << 48, 0x7FF0 << 48),
    np.dtype(np.float32): _Bits(4, 0x7F80 << 16, 0x7F80 << 16),
    np.dtype(np.float16): _Bits(2, 0x7C00, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): _Bits(2, 0x7F80, 0x7F80),
    np.dtype(ml_dtypes.float8_e5m2): _Bits(1, 0x7C, 0x7C),
    np.dtype(ml_dtypes.float8_e4m3fn): _Bits(1, 0x7F, None),  # has no infinity
}


class NotFinite(NamedTuple):
    """How many numbers of a tensor are NaN, and how many infinite."""

    nan: int
    inf: int

    def __str__(self) -> str:
        counts = ((self.nan, "NaN"), (self.inf, "infinite"))
        return ", ".join(f"{count} {what}" for count, what in counts if count)


def not_finite(array: np.ndarray) -> NotFinite:
    """Counts of a tensor; numbers of other dtypes than floats are always finite."""
    bits = _BITS.get(array.dtype)
    if bits is None or not array.nbytes:
        return NotFinite(0, 0)
    sign, data = 1 << (8 * bits.width - 1), np.ascontiguousarray(array).reshape(-1)
    unsigned = data.view(f"u{bits.width}")
    # Fast path for almost all tensors: two maxima, no temporary array.
    if data.view(f"i{bits.width}").max() < bits.first and unsigned.max() < sign | bits.first:
        return NotFinite(0, 0)
    magnitudes = unsigned & unsigned.dtype.type(sign - 1)
    infinite = 0 if bits.infinity is None else np.count_nonzero(magnitudes == bits.infinity)
    return NotFinite(int(np.count_nonzero(magnitudes >= bits.first) - infinite), int(infinite))


def check_scale(name: str, scale: np.ndarray) -> None:
    """Refuses invalid quantisation scales.

    Args:
      name: of the tensor, for the message.
      scale: FP8 scales of any float dtype, which a model holds in float32, or MXFP4 scales in
        uint8.
    Raises:
      CheckpointError: an FP8 scale is NaN, infinite, negative or zero in float32; an MXFP4 scale is
        255.
    """
    if scale.dtype == np.uint8:
        if scale.size and scale.max() == MXFP4_NAN:
            count = np.count_nonzero(scale == MXFP4_NAN)
            raise CheckpointError(
                f"{name}: {count} of {scale.size} MXFP4 scales are the byte {MXFP4_NAN}, which "
                "means NaN; the weight has no values there, so download or quantise it again"
            )
        return
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        numbers = np.asarray(scale, dtype=np.float32).reshape(-1)
    broken = numbers[~((numbers > 0) & (numbers < np.inf))]
    if len(broken):
        raise CheckpointError(
            f"{name}: {len(broken)} of {numbers.size} FP8 scales are not positive finite numbers, "
            f"the first is {broken[0]:g}; the weight has no values there, so download or quantise "
            "it again"
        )
