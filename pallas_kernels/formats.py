"""Storage formats of weights: values and scales, identified by their dtypes and shapes.

Weights W [..., N, K] are stored with K, the contraction axis, contiguous:

- plain: values bfloat16 or float32 [..., N, K], scale None.
- fp8: values float8_e4m3fn [..., N, K]; scale float32 [..., Sn, Sk] multiplies them. Sn is N (one
  for each row) or ceil(N / 128), Sk is 1 (one for all columns) or ceil(K / 128); the last block may
  be ragged.
- fp8 tiles: the numbers of fp8 as [..., N / 64, K / 128, 8192], in the order of
  `pallas_kernels.fp8_tiles`. The scale is that of fp8, so the values have one axis more than it.
- mxfp4: values uint8 [..., N, K / 2], e2m1 elements; scale uint8 [..., N, K / 32], e8m0: code s
  multiplies 32 elements by 2^(s - 127), and 255 is NaN.

An mxfp4 byte:

      byte j   bit 7  6  5  4 | 3  2  1  0       element 2j + 1 | element 2j
                   s  e  e  m | s  e  e  m       s: sign, eem: index into 0, 0.5, 1, 1.5, 2, 3, 4, 6

Leading axes (experts, gate and up) are the same for values and scale.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import fp8_tiles
from pallas_kernels.blocks import BLOCK, GROUP

Kind = Literal["plain", "fp8", "fp8_tiles", "mxfp4"]
_PLAIN = (jnp.float32, jnp.bfloat16, jnp.float16)


def kind(values: jax.Array, scale: jax.Array | None) -> Kind:
    """Format of a weight; the arguments need only a shape and a dtype.

    Raises:
      ValueError: no format has these dtypes and shapes.
    """
    if len(values.shape) < 2:
        raise ValueError(f"a weight needs rows and columns: {values.shape=}")
    if scale is None:
        if values.dtype not in _PLAIN:
            raise ValueError(
                f"{values.dtype=} without a scale: a plain weight is bfloat16 or float32"
            )
        return "plain"
    is_tiled = values.dtype == jnp.float8_e4m3fn and len(values.shape) == len(scale.shape) + 1
    is_tiled &= values.shape[-1] == fp8_tiles.SIZE
    *leading, N, width = fp8_tiles.logical_shape(values.shape) if is_tiled else values.shape
    if values.dtype == jnp.float8_e4m3fn:
        if scale.dtype != jnp.float32:
            raise ValueError(f"fp8 values need a float32 scale: {scale.dtype=}")
        rows, columns = {N, -(-N // BLOCK)}, {1, -(-width // BLOCK)}
    elif values.dtype == jnp.uint8:
        if scale.dtype != jnp.uint8:
            raise ValueError(f"mxfp4 values need a uint8 (e8m0) scale: {scale.dtype=}")
        if 2 * width % GROUP:
            raise ValueError(f"mxfp4 packs rows in groups of {GROUP // 2} bytes: {values.shape=}")
        rows, columns = {N}, {2 * width // GROUP}
    else:
        raise ValueError(
            f"{values.dtype=} with a scale: must be float8_e4m3fn (fp8) or uint8 (mxfp4)"
        )
    wanted = [*({size} for size in leading), rows, columns]
    if len(scale.shape) != len(wanted) or any(
        size not in sizes for size, sizes in zip(scale.shape, wanted, strict=True)
    ):
        sizes = ", ".join(" or ".join(map(str, sorted(sizes))) for sizes in wanted)
        raise ValueError(
            f"{scale.shape=} does not fit {values.dtype} {values.shape=}: it must be [{sizes}]"
        )
    if is_tiled:
        return "fp8_tiles"
    return "fp8" if values.dtype == jnp.float8_e4m3fn else "mxfp4"


def logical_shape(values: jax.Array, scale: jax.Array | None) -> tuple[int, ...]:
    """Shape [..., N, K] of the unpacked weight; raises as `kind` does."""
    form = kind(values, scale)
    if form == "fp8_tiles":
        return fp8_tiles.logical_shape(values.shape)
    *leading, width = values.shape
    return (*leading, 2 * width if form == "mxfp4" else width)


def kernel_refusal(values: jax.Array, scale: jax.Array | None) -> str | None:
    """Why GPU kernels do not support a weight [..., N, K], or None; raises as `kind` does."""
    form = kind(values, scale)
    if form == "plain" and values.dtype != jnp.bfloat16:
        return f"plain weights must be bfloat16, not {values.dtype}"
    *_, N, width = fp8_tiles.logical_shape(values.shape) if form == "fp8_tiles" else values.shape
    if form in ("fp8", "fp8_tiles") and scale.shape[-2:] not in (
        (-(-N // BLOCK), -(-width // BLOCK)),
        (N, 1),
    ):
        return f"fp8 scales must be those of {BLOCK}x{BLOCK} blocks or rows, not {scale.shape}"
    if form == "mxfp4" and N * scale.shape[-1] % 16:
        return f"mxfp4 scales are copied in units of 16 bytes: {scale.shape}"
    if form == "mxfp4" and width % 32:
        return f"mxfp4 rows must be multiples of 64 columns: [{N}, {2 * width}]"
    if N % 8 or width * values.dtype.itemsize % 16:
        return f"rows of tiles are copied in units of 16 bytes: [{N}, {width}] {values.dtype}"
    return None


def compile_refusal(values: jax.Array, scale: jax.Array | None) -> str | None:
    """Why kernels with such a weight do not compile for a GPU, or None. The interpreter runs
    them."""
    if kind(values, scale) == "fp8_tiles":
        return None
    *_, N, width = values.shape
    if N > 32 and N % 32:
        return f"the number of rows must be a multiple of 32: [{N}, {width}]"
    unit = 128 // values.dtype.itemsize
    if kind(values, scale) != "mxfp4" and width % unit:
        return f"the number of columns must be a multiple of {unit}: [{N}, {width}] {values.dtype}"
    return None


def dequantize(values: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The unpacked weight [..., N, K] in `dtype`.

    fp8 is scaled in float32 and rounded once to `dtype`. mxfp4 is exact in float32 and bfloat16,
    including subnormal numbers. A plain weight is cast.

    Raises:
      ValueError: as `kind`.
    """
    match kind(values, scale):
        case "plain":
            return values.astype(dtype)
        case "fp8":
            return (values.astype(jnp.float32) * spread(scale, *values.shape[-2:])).astype(dtype)
        case "fp8_tiles":
            return dequantize(fp8_tiles.restore(values), scale, dtype)
        case "mxfp4":
            return _mxfp4(values, scale).astype(dtype)


def spread(scale: jax.Array, N: int, K: int) -> jax.Array:
    """The scale of each element: [..., Sn, Sk] -> [..., N, K], or [..., N, 1] for one per row."""
    if scale.shape[-2] != N:
        scale = jnp.repeat(scale, BLOCK, axis=-2)[..., :N, :]
    if scale.shape[-1] != 1:
        scale = jnp.repeat(scale, BLOCK, axis=-1)[..., :K]
    return scale


def _mxfp4(values: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 [..., N, K] by bit operations: a CPU multiplication would flush subnormals to 0."""
    codes = jnp.stack([values & 15, values >> 4], axis=-1).astype(jnp.int32)
    codes = codes.reshape(*scale.shape, GROUP)
    exponent = scale[..., None].astype(jnp.int32)
    index = codes & 7
    # An index >= 2 is two exponent bits and one mantissa bit. Added to the scale's exponent it
    # gives the top bits of the float32. Index 1 (0.5) is subnormal in e2m1 and needs a correction
    # of 1.
    top = 2 * (exponent - 1) + index - (index == 1)
    subnormal = index << (21 + jnp.minimum(exponent, 1))  # only for scale codes 0 and 1
    bits = jnp.where(top < 2, subnormal, jnp.where(top < 510, top << 22, 0x7F800000))
    bits = jnp.where(index == 0, 0, bits) | (codes & 8) << 28
    bits = jnp.where(exponent == 255, 0x7FC00000, bits)
    floats = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return floats.reshape(*values.shape[:-1], 2 * values.shape[-1])
