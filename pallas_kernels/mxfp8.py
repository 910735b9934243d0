"""The mxfp8 format of OCP's Microscaling specification: e4m3, one power of two for each row and 32
columns.

The scale of a group is `2^(floor(log2(largest magnitude)) - 8)`, stored as e8m0 (code s is
`2^(s - 127)`, 255 is NaN). So the largest magnitude lies in [256, 512) times the scale, and what
exceeds 448, the largest e4m3 number, becomes 448. A group of zeros has scale 1. One that holds an
infinite number or NaN has scale NaN.

A product of rows x and weights w in this format is, for each row and each weight row,

    sum over groups g, ascending, of 2^(scale of x + scale of w) * (sum over the group's 32 columns
    of x * w)

with sums in float32. All factors are exact, so only the order of additions belongs to a chip.

Scales of both operands are stored as Blackwell's tensor cores read them (PTX: tcgen05.mma,
scale_vec::1X): one block of [32, 16] bytes for each tile of 128 rows and 128 columns,

    block[r, 4 q + j] = scale of row 32 q + r and of columns 32 j .. 32 j + 31 of the tile

and tiles past the end have scale 1.
"""

import jax
import jax.numpy as jnp

GROUP = 32
"""Columns of a group with one scale."""
TILE = 128
"""Rows and columns of a tile of scales."""
LARGEST = 448.0
ONE = 127
"""e8m0 code of scale 1."""
_NAN = 255


def codes_of(largest: jax.Array) -> jax.Array:
    """e8m0 codes uint8 of groups with these largest magnitudes, float32 of the same shape."""
    exponent = (jax.lax.bitcast_convert_type(largest, jnp.uint32) >> 23).astype(jnp.int32)
    # Code 0 is a subnormal float32, which a CPU flushes to 0.
    codes = jnp.where(largest == 0, ONE, jnp.maximum(exponent - 8, 1))
    return jnp.where(exponent == 255, _NAN, codes).astype(jnp.uint8)


def factors(codes: jax.Array) -> jax.Array:
    """The numbers float32 that e8m0 codes uint8 stand for."""
    bits = jnp.where(codes == 0, 1 << 22, codes.astype(jnp.int32) << 23)
    bits = jnp.where(codes == _NAN, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., K] -> values float8_e4m3fn [..., K], codes uint8 [..., ceil(K / 32)]."""
    *leading, K = x.shape
    padding = [(0, 0)] * len(leading) + [(0, -K % GROUP)]
    groups = jnp.pad(x.astype(jnp.float32), padding).reshape(*leading, -1, GROUP)
    codes = codes_of(jnp.abs(groups).max(-1))
    # The inverse of a power of two has the negative exponent: exact, where a division need not be.
    inverse = jnp.where(codes == _NAN, jnp.nan, factors(254 - codes))
    scaled = jnp.clip(groups * inverse[..., None], -LARGEST, LARGEST)
    return scaled.astype(jnp.float8_e4m3fn).reshape(*leading, -1)[..., :K], codes


def dequantize(values: jax.Array, codes: jax.Array) -> jax.Array:
    """values [..., K] times their scales, codes [..., ceil(K / 32)]; float32, exact."""
    scale = jnp.repeat(factors(codes), GROUP, axis=-1)[..., : values.shape[-1]]
    return values.astype(jnp.float32) * scale


def rounded(x: jax.Array) -> jax.Array:
    """x [..., K] as its quantised groups represent it, float32."""
    return dequantize(*quantize(x))


def widened(x: jax.Array, columns: int) -> jax.Array:
    """x [..., K] with zeros up to the columns of a weight, which may be K rounded up to whole
    tiles."""
    missing = columns - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def operand(x: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Rows x [R, K] as a kernel reads them: values [R, K], and scales in tiles of `tile` rows, see
    `pack`."""
    values, codes = quantize(x)
    return values, pack(codes, tile)


def tiles(rows: int, columns: int, tile: int = TILE) -> tuple[int, int, int, int]:
    """Shape of `pack`'s result for a matrix [rows, columns]."""
    return -(-rows // tile), -(-columns // TILE), 32, 16


def pack(codes: jax.Array, tile: int = TILE) -> jax.Array:
    """Codes [..., N, G] of N rows -> [..., ceil(N / tile), ceil(G / 4), 32, 16].

    Args:
      tile: rows of a tile, at most 128; a block always has room for 128.
    """
    *leading, N, G = codes.shape
    none = [(0, 0)] * len(leading)
    codes = jnp.pad(codes, (*none, (0, -N % tile), (0, -G % 4)), constant_values=ONE)
    codes = codes.reshape(*leading, -1, tile, codes.shape[-1])
    rest = (*none, (0, 0), (0, TILE - tile), (0, 0))
    codes = jnp.pad(codes, rest, constant_values=ONE)
    codes = codes.reshape(*codes.shape[:-2], 4, 32, -1, 4)  # [.., tile, q, r, step, j]
    codes = jnp.moveaxis(codes, -2, -4)  # [.., tile, step, q, r, j]
    return jnp.swapaxes(codes, -3, -2).reshape(*codes.shape[:-3], 32, 16)


def unpack(packed: jax.Array, rows: int, columns: int, tile: int = TILE) -> jax.Array:
    """The inverse of `pack`: codes [..., rows, ceil(columns / 32)]."""
    blocks = packed.reshape(*packed.shape[:-1], 4, 4)  # [.., tile, step, r, q, j]
    blocks = jnp.moveaxis(jnp.swapaxes(blocks, -3, -2), -4, -2)  # [.., tile, q, r, step, j]
    *leading, count = blocks.shape[:-4]
    codes = blocks.reshape(*leading, count, TILE, -1)[..., :tile, :]
    return codes.reshape(*leading, count * tile, -1)[..., :rows, : -(-columns // GROUP)]
