"""Tiles of weights inside a Hopper kernel: a warpgroup multiplies 64 rows, unpacked ones from registers."""

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
        # Registers hold totals of all tokens. There is room for a product of 128 beside them unless weights
        # are unpacked there, or many threads have few each.
        most = 64 if self.unpacked or groups > 2 else 128
        return max(1, tokens // most)

    def add_products(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        tiles: Sequence[Any],
        x: Any,
        refill: Callable,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
    ) -> list[jax.Array]:
        pieces = len(totals) // len(tiles)
        if pieces == 1:
            products = self._products(tiles, x, interpret, scales, step)
            made = self.add(totals, factors, products)
        else:
            # Mxfp4 is unpacked for each piece anew: half a tile of it is all that registers have room for.
            once = self.kind == "fp8" and interpret is None
            unpacked = list(map(_unpack, tiles)) if once else None
            made, size = list(totals), x.shape[0] // pieces
            for piece in range(pieces):
                here = x.at[piece * size : (piece + 1) * size]
                products = self._products(tiles, here, interpret, scales, step, unpacked)
                added = self.add(totals[piece::pieces], factors, products)
                made[piece::pieces] = added if interpret is not None else map(_made_here, added)
        refill()
        return made

    def _products(
        self,
        tiles: Sequence[Any],
        x: Any,
        interpret: Any,
        scales: Sequence[Any],
        step: Any,
        unpacked: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """`unpacked` are fp8 tiles in registers, if they are there already."""
        mxfp4 = weight_tiles_mxfp4
        if interpret is not None and self.unpacked:
            # The interpreter multiplies shared memory only.
            wide = x[...].astype(jnp.float32).T
            if self.kind == "mxfp4":
                codes = [mxfp4.load_scales(one, self.rows, step, interpret) for one in scales]
                made = [
                    mxfp4.interpreted(tile[...], c) for tile, c in zip(tiles, codes, strict=True)
                ]
            else:
                made = [_unpack(tile).astype(jnp.float32) for tile in tiles]
            return [jnp.dot(one, wide) for one in made]

        def multiply(*accs):
            if self.kind == "mxfp4":
                mxfp4.multiply(accs, tiles, scales, step, x)
            else:
                for i, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                    if self.unpacked:
                        tile = unpacked[i] if unpacked else _unpack(tile)
                    plgpu.wgmma(acc, tile, x.T)
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accs]

        accs = [plgpu.ACC((self.rows, x.shape[0]), jnp.float32)] * len(tiles)
        return pl.run_scoped(multiply, *accs)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Padded with zeros to whole tiles."""
        if x is None or x.shape[axis] % self.rows == 0:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % self.rows)
        return jnp.pad(x, widths)

    def load_rows(self, source: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        here = source.at[pl.ds(first, self.rows)]
        one = plgpu.load(here, layout=self.layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(one.astype(jnp.float32), (self.rows, tokens), (0,))


def _made_here(x: jax.Array) -> jax.Array:
    """The same, and no later: the compiler would add all products in the end, and keep all until then."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def barrier(_, x):
        return mgpu.optimization_barrier(x)

    return barrier(x)


def _unpack(tile: Any) -> jax.Array:
    """An fp8 tile in shared memory as bfloat16 in the registers of tensor cores' first operand."""
    packed = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    # Reordered while it is 8 bits wide, which halves the exchange between threads. There is no direct
    # conversion to bfloat16; through float32 it is exact.
    packed = plgpu.layout_cast(packed, plgpu.Layout.WGMMA)
    return packed.astype(jnp.float32).astype(jnp.bfloat16)
