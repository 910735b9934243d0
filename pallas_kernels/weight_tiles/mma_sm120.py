"""Tensor cores of RTX cards of the Blackwell generation: mma.sync with 64 weight rows per block.

These chips have neither wgmma nor tcgen05. Each warp multiplies 16 rows of the weight, and both
operands come from registers: x and stored tiles through ldmatrix, other weights from the unpackers
of Hopper. Registers of sums, and of unpacked weights, are those of wgmma (`Wgmma`); only the
product itself differs.

An element of a sum is one chain of instructions over 16 columns each (32 of e4m3), in ascending
order. The number of tokens in a tile changes nothing in this chain.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.weight_tiles.codecs import Codec
from pallas_kernels.weight_tiles.mma_sm90 import Wgmma


class MmaSync(Wgmma):
    part = 64
    threads_read = True

    def groups(self, wanted: int) -> int:
        return 1  # shared memory has no room for the tiles of several warpgroups

    def _products(
        self,
        codec: Codec,
        tiles_smem: Sequence[Any],
        load: Callable[[int], Callable] | None,
        x_smem: Any,
        interpret: Any,
    ) -> list[jax.Array]:
        width = 128 // codec.x_dtype.itemsize  # columns at once: 128 bytes, a row of the swizzle
        zeros = jnp.zeros((self.rows, x_smem.shape[0]), jnp.float32)
        sums = [plgpu.layout_cast(zeros, self.layout)] * len(tiles_smem)
        unpackers = [load(i) for i in range(len(tiles_smem))] if codec.unpacked else []
        for part in range(codec.step // width):
            columns = slice(part * width, (part + 1) * width)
            x_reg = plgpu.load(x_smem.at[:, columns].T, layout=plgpu.Layout.MMA_RHS(codec.x_dtype))
            for i, tile_smem in enumerate(tiles_smem):
                if codec.unpacked:
                    tile_reg = as_operand(unpackers[i](part), interpret)
                else:
                    layout = plgpu.Layout.MMA_LHS(codec.x_dtype)
                    tile_reg = plgpu.load(tile_smem.at[:, columns], layout=layout)
                sums[i] = plgpu.mma(sums[i], tile_reg, x_reg)
        return sums

    def unpack_fp8(self, tile_smem: Any) -> Callable[[int], jax.Array]:
        packed_reg = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        packed_reg = plgpu.layout_cast(packed_reg, plgpu.Layout.WGMMA)
        # A part at a time: a whole tile in bfloat16 takes twice the registers, and gate and up
        # would spill.
        part_of = lambda i: packed_reg[:, i * self.part : (i + 1) * self.part]
        return lambda i: part_of(i).astype(jnp.float32).astype(jnp.bfloat16)

    def unpack_mxfp4(
        self, tile_smem: Any, scales_smem: Any, step: Any, interpret: Any
    ) -> Callable[[int], jax.Array]:
        unpack = super().unpack_mxfp4(tile_smem, scales_smem, step, interpret)
        if interpret is not None:
            return lambda i: unpack(i).astype(jnp.bfloat16)
        half = functools.cache(unpack)  # two parts
        return lambda i: half(i // 2)[:, i % 2 * self.part : (i % 2 + 1) * self.part]


def as_operand(rows_reg: jax.Array, interpret: Any) -> jax.Array:
    """bfloat16 [64, n] in the registers of wgmma, as the first operand of mma: the same registers.

    Mosaic converts arrays between the layouts of wgmma, and has no conversion to those of mma.
    """
    if interpret is not None:
        return rows_reg
    layout = plgpu.Layout.MMA_LHS(rows_reg.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(rows_reg.shape, rows_reg.dtype, layout=layout),
    )
    def rename(_, rows):
        # Both order registers by 8 columns first, and by the rows r and r + 8 second.
        to = layout.to_mgpu()
        out = np.empty(to.registers_shape(rows.shape), dtype=object)
        word = mlir.ir.IntegerType.get_signless(32)
        # Cast to integers and back: Mosaic replaces an array of unchanged registers by the array
        # they came from, which has the old layout.
        out.flat = [mlir.bitcast(mlir.bitcast(x, word), x.type) for x in rows.registers.flat]
        return mlir.FragmentedArray(_registers=out, _layout=to, _is_signed=None)

    return rename(rows_reg)
