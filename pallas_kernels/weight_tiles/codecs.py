"""Codecs: how the stored bits of a weight tile become operands, one class per storage format.

A codec describes the tile of one pipeline step and where its scales apply. It does not depend on
the chip; `mma` says in which registers a chip needs unpacked weights.

    codec       tile row in device memory   scales                            applied to
    Plain       128 bfloat16                none
    Fp8Blocks   128 e4m3                    float32, one per 128 x 128 block  product of each step
    Fp8Rows     128 e4m3                    float32, one per row              sum of each chunk
    Fp8Tiles    none: a tile is one piece   as Fp8Blocks or Fp8Rows; operands are float16 if x is
    Mxfp4       256 e2m1 in 128 bytes       e8m0, one per row and 32 columns  weights, in registers

`Fp8BlocksNative` and `Fp8RowsNative` are the e4m3 formats with e4m3 activations: the MMA multiplies
e4m3, and a row of x has one scale for each step, a factor on its column of the product.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.weight_tiles import mxfp4

STEP = 128
"""K columns of a bfloat16 or fp8 tile; equal to `formats.BLOCK`, so that an fp8 tile has one
scale."""


@dataclass(frozen=True)
class Codec(ABC):
    """One storage format.

    Attributes:
      dtype: stored elements.
      step: K columns of one tile.
      width: stored elements in one row of a tile.
      unpacked: threads convert the tile in registers; otherwise the MMA reads the stored tile.
      block_scaled: each tile has one scale, a factor on the product of that tile.
      row_scaled: each row has one scale, a factor on the sum of the steps of a chunk.
      staged: the scales of all of K are copied to shared memory before the first step.
      rescale: constant factor on the product of each tile.
      x_dtype: elements of the activations, which the MMA multiplies.
      x_scaled: each row of x has one scale per step, a factor on the product of that step.
      tiled: a tile is contiguous in device memory, in the order of its registers
        (`pallas_kernels.fp8_tiles`).
    """

    dtype: ClassVar[jnp.dtype]
    step: ClassVar[int] = STEP
    width: ClassVar[int] = STEP
    unpacked: ClassVar[bool] = True
    block_scaled: ClassVar[bool] = False
    row_scaled: ClassVar[bool] = False
    staged: ClassVar[bool] = False
    rescale: ClassVar[float] = 1.0
    x_dtype: ClassVar[jnp.dtype] = jnp.dtype(jnp.bfloat16)
    x_scaled: ClassVar[bool] = False
    tiled: ClassVar[bool] = False

    @property
    def row_bytes(self) -> int:
        """Bytes in one row of a tile."""
        return self.width * self.dtype.itemsize

    @property
    def scaled(self) -> bool:
        """Whether the product of a tile has a factor."""
        return self.block_scaled or self.x_scaled or self.rescale != 1.0

    @property
    def read_by_threads(self) -> bool:
        """Whether threads read a slot of the pipeline beside the MMA."""
        return self.unpacked or self.x_scaled

    def staged_scales(self, K: int) -> int:
        """Bytes of scales per weight row in shared memory."""
        return K // formats.GROUP if self.staged else 0

    def arrange(self, x: jax.Array) -> jax.Array:
        """Activations [..., K] with the columns in the order of unpacked weights."""
        return x

    def unpacker(
        self, mma: Any, tile_smem: Any, scales_smem: Any, step: Any, interpret: Any
    ) -> Callable[[int], jax.Array]:
        """Loads a tile to registers, for `unpacked` codecs.

        Args:
          tile_smem: `dtype` [mma.rows, width], or `fp8_tiles.LOADS` if `tiled`.
          scales_smem: staged scales uint8 [mma.rows * K / 32], or None.
          step: number of the tile along K.
          interpret: parameters of the interpreter, or None on a GPU.
        Returns:
          A function: i -> `x_dtype` [mma.rows, mma.part] in `mma`'s operand registers, columns from
          i * mma.part on.
        """
        raise NotImplementedError


class Plain(Codec):
    """bfloat16, no scale. The MMA reads the tile as it is stored."""

    dtype = jnp.dtype(jnp.bfloat16)
    unpacked = False


class Fp8Blocks(Codec):
    """e4m3, one float32 scale per block of 128 x 128."""

    dtype = jnp.dtype(jnp.float8_e4m3fn)
    block_scaled = True

    def unpacker(self, mma, tile_smem, scales_smem, step, interpret):
        return mma.unpack_fp8(tile_smem)


class Fp8Rows(Fp8Blocks):
    """e4m3, one float32 scale per row."""

    block_scaled = False
    row_scaled = True


class Fp8Tiles(Fp8Blocks):
    """`Fp8Blocks`, arranged in tiles."""

    tiled = True

    def unpacker(self, mma, tile_smem, scales_smem, step, interpret):
        return mma.unpack_fp8_tile(tile_smem, interpret, self.x_dtype)


class Fp8TilesRows(Fp8Tiles):
    """`Fp8Rows`, arranged in tiles."""

    block_scaled = False
    row_scaled = True


class Fp8TilesHalf(Fp8Tiles):
    """`Fp8Tiles` with float16 activations (`activations.row_dtype`)."""

    x_dtype = jnp.dtype(jnp.float16)


class Fp8TilesRowsHalf(Fp8TilesRows):
    """`Fp8TilesRows` with float16 activations."""

    x_dtype = jnp.dtype(jnp.float16)


class Fp8BlocksNative(Fp8Blocks):
    """`Fp8Blocks` with e4m3 activations."""

    unpacked = False
    x_dtype = Fp8Blocks.dtype
    x_scaled = True


class Fp8RowsNative(Fp8Rows):
    """`Fp8Rows` with e4m3 activations."""

    unpacked = False
    x_dtype = Fp8Rows.dtype
    x_scaled = True


class Mxfp4(Codec):
    """e2m1, one e8m0 scale per row and 32 columns, applied while unpacking."""

    dtype = jnp.dtype(jnp.uint8)
    step = mxfp4.STEP
    width = mxfp4.STEP // 2
    staged = True
    rescale = mxfp4.RESCALE

    def arrange(self, x: jax.Array) -> jax.Array:
        return mxfp4.arrange(x)

    def unpacker(self, mma, tile_smem, scales_smem, step, interpret):
        return mma.unpack_mxfp4(tile_smem, scales_smem, step, interpret)


def codec_of(
    values: jax.Array, scale: jax.Array | None, x_dtype: jnp.dtype = jnp.bfloat16
) -> Codec:
    """Codec of a weight and activations of `x_dtype`; the arrays need only a shape and a dtype.

    Raises:
      ValueError: no format has these dtypes and shapes.
    """
    kind = formats.kind(values, scale)
    if kind in ("fp8", "fp8_tiles"):
        N = formats.logical_shape(values, scale)[-2]
        if scale.shape[-2] == N:
            return _CODECS[f"{kind}_rows", jnp.dtype(x_dtype)]
    return codec_of_kind(kind, x_dtype)


def codec_of_kind(kind: formats.Kind, x_dtype: jnp.dtype = jnp.bfloat16) -> Codec:
    """Codec of a kind of format. Row scales of fp8 do not change tile sizes, so they have no
    kind."""
    return _CODECS[kind, jnp.dtype(x_dtype)]


_CODECS: dict[tuple[str, jnp.dtype], Codec] = {
    (kind, codec.x_dtype): codec
    for kind, codecs in {
        "plain": (Plain(),),
        "fp8": (Fp8Blocks(), Fp8BlocksNative()),
        "fp8_rows": (Fp8Rows(), Fp8RowsNative()),
        "fp8_tiles": (Fp8Tiles(), Fp8TilesHalf()),
        "fp8_tiles_rows": (Fp8TilesRows(), Fp8TilesRowsHalf()),
        "mxfp4": (Mxfp4(),),
    }.items()
    for codec in codecs
}
