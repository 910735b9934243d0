"""Hopper's tensor cores: wgmma with 64 weight rows per warpgroup.

Stored tiles are read from shared memory; unpacked ones are the first operand from registers. x is
always the second operand, in shared memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fp8_tiles
from pallas_kernels import mlir_compat as mlir
from pallas_kernels.weight_tiles import mxfp4
from pallas_kernels.weight_tiles.codecs import Codec
from pallas_kernels.weight_tiles.mma import Mma, Operands, scaled_sums

_LOADS = plgpu.Layout.TILED(
    plgpu.Tiling(((128, fp8_tiles.LOAD), (32, fp8_tiles.LOAD))), (-4,), (-2,), -1
)
"""A tile [512, 16] in registers: each thread has four rows, 128 apart."""


class Wgmma(Mma):
    rows = 64
    part = 128
    layout = plgpu.Layout.WGMMA
    transposed = plgpu.Layout.WGMMA_TRANSPOSED

    def groups(self, wanted: int) -> int:
        return wanted

    def pieces(self, codec: Codec, tokens: int, groups: int) -> int:
        # Totals of all tokens stay in registers. The MMA accumulator beside them covers 128 tokens,
        # or 64 if registers also hold weights that are unpacked row by row, or if more than two
        # warpgroups share the register file.
        if tokens > 128:
            return 2
        is_wide = groups <= 2 and (groups == 2 if codec.tiled else not codec.unpacked)
        return max(1, tokens // (128 if is_wide else 64))

    def add_products(
        self,
        codec: Codec,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        operands: Operands,
        refill: Callable[[], None],
        interpret: Any,
    ) -> list[jax.Array]:
        if codec.x_scaled:
            return self._add_scaled(codec, totals_reg, factors, operands, refill, interpret)
        tiles_smem, x_smem = operands.tiles_smem, operands.x_smem
        pieces = len(totals_reg) // len(tiles_smem)
        size = x_smem.shape[0] // pieces
        load = lambda i: operands.unpacker(codec, self, i, interpret)
        if pieces > 1 and codec.unpacked and codec.step == self.part:
            # Registers hold one part of an unpacked tile. An fp8 tile is one part and is unpacked
            # once for all pieces; an mxfp4 tile is two and is unpacked again for each piece.
            load = list(map(load, range(len(tiles_smem)))).__getitem__
        sums = list(totals_reg)
        for piece in range(pieces):
            x_piece_smem = x_smem
            if pieces > 1:
                x_piece_smem = x_smem.at[piece * size : (piece + 1) * size]
            products = self._products(codec, tiles_smem, load, x_piece_smem, interpret)
            added = scaled_sums(codec, totals_reg[piece::pieces], factors, products)
            # The barrier limits register pressure: otherwise the compiler moves all additions
            # behind the last product and keeps every product live.
            sums[piece::pieces] = added if pieces == 1 else map(lax.optimization_barrier, added)
        refill()
        return sums

    def _add_scaled(
        self,
        codec: Codec,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        operands: Operands,
        refill: Callable[[], None],
        interpret: Any,
    ) -> list[jax.Array]:
        """`add_products` of stored tiles whose x has one scale per row."""
        tiles_smem, x_smem = operands.tiles_smem, operands.x_smem
        pieces = len(totals_reg) // len(tiles_smem)
        size = x_smem.shape[0] // pieces
        sums = list(totals_reg)
        # Products of more tokens at once leave no registers for the totals beside them.
        at_once = len(tiles_smem) if size <= 32 else 1
        for piece in range(pieces):
            part = slice(piece * size, (piece + 1) * size)
            x_part_smem, scale_smem = x_smem, operands.x_scale_smem
            if pieces > 1:
                x_part_smem, scale_smem = x_smem.at[part], scale_smem.at[part]
            scale_reg = plgpu.load(scale_smem, layout=self.layout.reduce(0), optimized=False)
            for first in range(0, len(tiles_smem), at_once):
                tiles = range(first, first + at_once)
                some_smem = [tiles_smem[i] for i in tiles]
                products = self._products(codec, some_smem, None, x_part_smem, interpret)
                for i, product in zip(tiles, products, strict=True):
                    column_reg = scale_reg * factors[i] if codec.block_scaled else scale_reg
                    factor = lax.broadcast_in_dim(column_reg, product.shape, (1,))
                    total = totals_reg[i * pieces + piece] + product * factor
                    sums[i * pieces + piece] = lax.optimization_barrier(total)
        refill()
        return sums

    def _products(
        self,
        codec: Codec,
        tiles_smem: Sequence[Any],
        load: Callable[[int], Callable] | None,
        x_smem: Any,
        interpret: Any,
    ) -> list[jax.Array]:
        """Each tile times x_smem [tokens, step]: float32 [rows, tokens] in registers.

        `load(i)` is the unpacker of tile i; None if the tiles are stored.
        """
        parts = codec.step // self.part
        if interpret is not None and codec.unpacked:
            return [self._interpreted(load(i), parts, x_smem) for i in range(len(tiles_smem))]

        def multiply(*accs_reg):
            if codec.unpacked:
                self._multiply_unpacked(accs_reg, load, parts, x_smem)
            else:
                self._multiply_stored(accs_reg, tiles_smem, x_smem)
            plgpu.wgmma_wait(0)
            return [acc_reg[...] for acc_reg in accs_reg]

        accs_reg = [plgpu.ACC((self.rows, x_smem.shape[0]), jnp.float32)] * len(tiles_smem)
        return pl.run_scoped(multiply, *accs_reg)

    def _multiply_stored(
        self, accs_reg: Sequence[Any], tiles_smem: Sequence[Any], x_smem: Any
    ) -> None:
        """Issues the wgmmas of stored tiles [rows, step], one per tile."""
        for tile_smem, acc_reg in zip(tiles_smem, accs_reg, strict=True):
            plgpu.wgmma(acc_reg, tile_smem, x_smem.T)

    def _multiply_unpacked(
        self, accs_reg: Sequence[Any], load: Callable[[int], Callable], parts: int, x_smem: Any
    ) -> None:
        """Issues the wgmmas of tiles in registers, each in `parts` parts; see `_products`."""
        for i, acc_reg in enumerate(accs_reg):
            unpack = load(i)
            for part in range(parts):
                columns_smem = x_smem
                if parts > 1:
                    columns_smem = x_smem.at[:, part * self.part : (part + 1) * self.part]
                plgpu.wgmma(acc_reg, unpack(part), columns_smem.T)
                if parts > 1:
                    # wgmma reads the weights from registers. With few tokens one wgmma overlaps the
                    # next unpack; with many the accumulators leave no registers for a second set of
                    # weights.
                    plgpu.wgmma_wait(1 if x_smem.shape[0] <= 32 else 0)

    def _interpreted(
        self, unpack: Callable[[int], jax.Array], parts: int, x_smem: Any
    ) -> jax.Array:
        """`_multiply_unpacked` of one tile: the interpreter has no wgmma with an operand in
        registers."""
        weights = jnp.concatenate([unpack(part) for part in range(parts)], axis=1)
        return jnp.dot(weights.astype(jnp.float32), x_smem[...].astype(jnp.float32).T)

    def unpack_fp8(self, tile_smem: Any) -> Callable[[int], jax.Array]:
        packed_reg = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
        # The layout changes while elements are 8 bits wide: half as many shuffles between threads.
        # There is no direct conversion to bfloat16; the one through float32 is exact.
        packed_reg = plgpu.layout_cast(packed_reg, plgpu.Layout.WGMMA)
        tile_reg = packed_reg.astype(jnp.float32).astype(jnp.bfloat16)
        return lambda part: tile_reg

    def unpack_fp8_tile(
        self, tile_smem: Any, interpret: Any, dtype: jnp.dtype
    ) -> Callable[[int], jax.Array]:
        if interpret is not None:
            tile = fp8_tiles.restore(tile_smem[...].reshape(1, 1, fp8_tiles.SIZE))
            return lambda part: tile.astype(dtype)
        tile_reg = _in_operand_order(plgpu.load(tile_smem, layout=_LOADS, optimized=False))
        if dtype != jnp.float16:  # there is no direct conversion to bfloat16
            tile_reg = tile_reg.astype(jnp.float32)
        tile_reg = tile_reg.astype(dtype)
        return lambda part: tile_reg

    def unpack_mxfp4(
        self, tile_smem: Any, scales_smem: Any, step: Any, interpret: Any
    ) -> Callable[[int], jax.Array]:
        codes_reg = mxfp4.load_scales(scales_smem, self.rows, step, interpret)
        if interpret is not None:
            weights = mxfp4.interpreted(tile_smem[...], codes_reg)
            return lambda half: weights[:, half * self.part : (half + 1) * self.part]
        words_reg = plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA_8BIT)
        return lambda half: mxfp4.unpack_half(words_reg, codes_reg, half)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Pads with zeros to a multiple of the tile rows."""
        if x is None or x.shape[axis] % self.rows == 0:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % self.rows)
        return jnp.pad(x, widths)

    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        rows_gmem = source_gmem.at[pl.ds(first, self.rows)]
        column_reg = plgpu.load(rows_gmem, layout=self.layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(column_reg.astype(jnp.float32), (self.rows, tokens), (0,))


@plgpu.inline_mgpu(
    arg_types=(_LOADS,),
    return_type=plgpu.ShapeDtypeStruct(
        (fp8_tiles.ROWS, fp8_tiles.COLUMNS), jnp.float8_e4m3fn, layout=plgpu.Layout.WGMMA
    ),
)
def _in_operand_order(_, loaded: Any) -> Any:
    """Registers of a tile [512, 16] under the names that they have as wgmma's first operand; no
    instruction."""
    shape, layout = (fp8_tiles.ROWS, fp8_tiles.COLUMNS), mlir.WGMMA_LAYOUT
    out = np.empty(layout.registers_shape(shape), dtype=object)
    pairs = fp8_tiles.LOAD // 2
    out.flat = [
        mlir.vector_slice(word, slice(2 * i, 2 * i + 2))
        for word in loaded.registers.flat
        for i in range(pairs)
    ]
    return mlir.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
