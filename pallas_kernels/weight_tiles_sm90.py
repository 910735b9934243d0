"""Weight tiles on Hopper: wgmma with 64 weight rows per warpgroup.

Quantised tiles are converted to bfloat16 in registers and are wgmma's first operand from there. Plain
tiles are read from shared memory. x is always the second operand, in shared memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import weight_tiles, weight_tiles_mxfp4


class Format(weight_tiles.Format):
    rows = 64
    layout = plgpu.Layout.WGMMA
    transposed = plgpu.Layout.WGMMA_TRANSPOSED

    def groups(self, wanted: int) -> int:
        return wanted

    def pieces(self, tokens: int, groups: int) -> int:
        # Totals of all tokens stay in registers. The MMA accumulator beside them covers 128 tokens, or 64 if
        # registers also hold unpacked weights or more than two warpgroups share the register file.
        most = 64 if self.unpacked or groups > 2 else 128
        return max(1, tokens // most)

    def add_products(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        tiles: Sequence[Any],
        x_smem: Any,
        refill: Callable,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
    ) -> list[jax.Array]:
        pieces = len(totals) // len(tiles)
        if pieces == 1:
            products = self._products(tiles, x_smem, interpret, scales, step)
            sums = self.add(totals, factors, products)
        else:
            # fp8 is unpacked once for all pieces. Mxfp4 is unpacked again for each piece, because registers
            # have room for half a tile only.
            once = self.kind == "fp8" and interpret is None
            unpacked_reg = list(map(_unpack, tiles)) if once else None
            sums, size = list(totals), x_smem.shape[0] // pieces
            for piece in range(pieces):
                x_piece = x_smem.at[piece * size : (piece + 1) * size]
                products = self._products(tiles, x_piece, interpret, scales, step, unpacked_reg)
                added = self.add(totals[piece::pieces], factors, products)
                sums[piece::pieces] = added if interpret is not None else map(_pin, added)
        refill()
        return sums

    def _products(
        self,
        tiles: Sequence[Any],
        x_smem: Any,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
        unpacked_reg: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Each tile times x_smem [tokens, step]: float32 [rows, tokens] in registers.

        `unpacked_reg`: the fp8 tiles as bfloat16 in registers, if they are unpacked already.
        """
        mxfp4 = weight_tiles_mxfp4
        if interpret is not None and self.unpacked:
            # The interpreter has no MMA with an operand in registers.
            x = x_smem[...].astype(jnp.float32).T
            if self.kind == "mxfp4":
                codes = [mxfp4.load_scales(ref, self.rows, step, interpret) for ref in scales]
                weights = [
                    mxfp4.interpreted(tile[...], c) for tile, c in zip(tiles, codes, strict=True)
                ]
            else:
                weights = [_unpack(tile).astype(jnp.float32) for tile in tiles]
            return [jnp.dot(weight, x) for weight in weights]

        def multiply(*accs):
            if self.kind == "mxfp4":
                mxfp4.multiply(accs, tiles, scales, step, x_smem)
            else:
                for i, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                    if self.unpacked:
                        tile = unpacked_reg[i] if unpacked_reg else _unpack(tile)
                    plgpu.wgmma(acc, tile, x_smem.T)
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accs]

        accs = [plgpu.ACC((self.rows, x_smem.shape[0]), jnp.float32)] * len(tiles)
        return pl.run_scoped(multiply, *accs)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Pads the axis with zeros to a multiple of the tile rows."""
        if x is None or x.shape[axis] % self.rows == 0:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % self.rows)
        return jnp.pad(x, widths)

    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        rows_gmem = source_gmem.at[pl.ds(first, self.rows)]
        column = plgpu.load(rows_gmem, layout=self.layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(column.astype(jnp.float32), (self.rows, tokens), (0,))


def _pin(x: jax.Array) -> jax.Array:
    """Identity plus an optimisation barrier: limits register pressure.

    Otherwise the compiler moves all additions behind the last product and keeps every product live.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def barrier(_, x):
        return mgpu.optimization_barrier(x)

    return barrier(x)


def _unpack(tile_smem: Any) -> jax.Array:
    """fp8 tile in shared memory -> bfloat16 in registers, in the layout of wgmma's first operand."""
    packed = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    # The layout changes while elements are 8 bits wide: half as many shuffles between threads. There is no
    # direct conversion to bfloat16; the one through float32 is exact.
    packed = plgpu.layout_cast(packed, plgpu.Layout.WGMMA)
    return packed.astype(jnp.float32).astype(jnp.bfloat16)
