"""Tiles of weights inside a Hopper kernel: how each format is fetched, unpacked and multiplied.

Weights are the M operand of the product (64 rows a warpgroup), tokens the N operand ("swap-AB"): with few
tokens no part of the tensor core is wasted on padding. A weight is unpacked to bfloat16 in registers, so it
streams from memory at its own width and the product is that of bfloat16 activations, exactly
rounded factors and float32 sums. (Hopper's FP8 product keeps fewer bits, and activations would have to be
quantised.)

Every step of columns the partial product is multiplied by the block's scale and added to a float32 total.
(Mxfp4's scales are in the unpacked weights already, see `weight_tiles_mxfp4`.)
A sum over K therefore depends on K and the number of chunks alone, never on the rows in the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, weight_tiles_mxfp4

ROWS = 64
"""Weight rows of one tile: what one warpgroup multiplies."""
STEP = 128
"""Columns (of the sum) of one tile; `formats.BLOCK`, so that a tile has one fp8 scale. Not of mxfp4."""

TOTAL = weight_tiles_mxfp4.TOTAL
"""What products with mxfp4 tiles are to be multiplied by."""

_SWIZZLE = 128  # bytes


def swizzled(dtype: jnp.dtype) -> tuple:
    """Transforms of a shared-memory tile that tensor cores and TMA both read without conflicts."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))


@dataclass(frozen=True)
class Format:
    """How one weight is stored, as a kernel needs to know it.

    Attributes:
      kind: see `formats`.
      per_row: fp8 only: one scale a row ([N, 1]), which multiplies the total.
    """

    kind: formats.Kind
    per_row: bool = False

    @classmethod
    def of(cls, values: jax.Array, scale: jax.Array | None) -> "Format":
        kind = formats.kind(values, scale)
        return cls(kind, per_row=kind == "fp8" and scale.shape[-2] == values.shape[-2])

    @property
    def in_blocks(self) -> bool:
        """Whether each tile has a scale of its own, which multiplies the tile's product."""
        return self.kind == "fp8" and not self.per_row

    @property
    def dtype(self) -> jnp.dtype:
        kinds = dict(plain=jnp.bfloat16, fp8=jnp.float8_e4m3fn, mxfp4=jnp.uint8)
        return jnp.dtype(kinds[self.kind])

    @property
    def step(self) -> int:
        """Columns (of the sum) of one tile."""
        return weight_tiles_mxfp4.STEP if self.kind == "mxfp4" else STEP

    @property
    def width(self) -> int:
        """Stored values of a tile's row."""
        return self.step // 2 if self.kind == "mxfp4" else self.step

    @property
    def unpacked(self) -> bool:
        """Whether threads read the tiles, rather than tensor cores."""
        return self.kind != "plain"

    @property
    def staged(self) -> bool:
        """Whether scales are fetched to shared memory, those of all columns before the first step."""
        return self.kind == "mxfp4"

    def scratch(self, stages: int, parts: int, tokens: int, K: int) -> dict[str, Any]:
        """Shared memory: w_s for weights, x_s for bfloat16 activations, and scales if they are staged."""
        transforms = swizzled(self.dtype)
        if self.kind == "mxfp4":  # K / 2 need not be a multiple of a tile's width
            transforms = transforms[1:]
        found = dict(
            w_s=plgpu.SMEM((stages, parts, ROWS, self.width), self.dtype, transforms=transforms),
            x_s=plgpu.SMEM(
                (stages, tokens, self.step), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            ready=plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
        )
        if self.staged:
            found["scale_s"] = plgpu.SMEM((parts, ROWS * (K // formats.GROUP)), jnp.uint8)
            found["scales_ready"] = plgpu.Barrier(num_arrivals=parts)
        return found

    def kernel_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """The scale as kernels take it; nothing is copied for shapes that models have."""
        if self.staged:
            return scale.reshape(-1)
        return pad_rows(scale, -2) if self.per_row else scale

    def arrange(self, x: jax.Array) -> jax.Array:
        """Activations [.., K] with columns in the order in which `products` takes them."""
        return weight_tiles_mxfp4.arrange(x) if self.kind == "mxfp4" else x

    def products(
        self,
        tiles: Sequence[Any],
        x: Any,
        tokens: int,
        interpret: Any,
        scales: Sequence[Any] = (),
        step: Any = 0,
    ) -> list[jax.Array]:
        """Each tile [ROWS, step] times x [tokens, step], all in shared memory: float32 [ROWS, tokens].

        x is arranged. Of mxfp4 `scales` are those of each tile's rows, [ROWS * K / 32] in shared memory,
        the tiles are number `step` along K, and the products are to be multiplied by `TOTAL`.
        """
        mxfp4 = weight_tiles_mxfp4
        if interpret is not None and self.unpacked:
            # The interpreter multiplies shared memory only.
            wide = x[...].astype(jnp.float32).T
            if self.kind == "mxfp4":
                codes = [mxfp4.load_scales(one, ROWS, step, interpret) for one in scales]
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
                for tile, acc in zip(tiles, accs, strict=True):
                    plgpu.wgmma(acc, _unpack(tile) if self.unpacked else tile, x.T)
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in accs]

        accs = [plgpu.ACC((ROWS, tokens), jnp.float32)] * len(tiles)
        return pl.run_scoped(multiply, *accs)


def _unpack(tile: Any) -> jax.Array:
    """An fp8 tile in shared memory as bfloat16 in the registers of tensor cores' first operand."""
    packed = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    # Reordered while it is 8 bits wide, which halves the exchange between threads. There is no direct
    # conversion to bfloat16; through float32 it is exact.
    packed = plgpu.layout_cast(packed, plgpu.Layout.WGMMA)
    return packed.astype(jnp.float32).astype(jnp.bfloat16)


def zeros(tokens: int) -> jax.Array:
    """float32 [ROWS, tokens] in the accumulator's layout."""
    return plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)


def fetch_tile(source: Any, tile: Any, ready: Any) -> None:
    """Starts copying `source` into shared memory; what lies outside of its array becomes zeros."""
    plgpu.copy_gmem_to_smem(source, tile, ready, oob_mode=plgpu.OOBFillMode.ZEROS)


def fetch_scales(source: Any, row: Any, scales: Any, ready: Any) -> None:
    """Starts copying mxfp4 scales of ROWS rows, from the given one on, into shared memory.

    As contiguous bytes: for a tensor copy each row would have to be a multiple of 16 bytes. What lies
    past the array is left as it is.

    Args:
      source: device memory, uint8 [rows of all weights * K / 32].
      scales: [ROWS * K / 32].
    """
    size = scales.shape[0]
    here = source.at[pl.ds(row * (size // ROWS), size)]
    plgpu.copy_gmem_to_smem(here, scales, ready, oob_mode=plgpu.OOBFillMode.UNDEFINED)


def pad_rows(x: jax.Array | None, axis: int = -1) -> jax.Array | None:
    """One number a weight row, padded with zeros to whole tiles, for `load_rows`."""
    if x is None or x.shape[axis] % ROWS == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % ROWS)
    return jnp.pad(x, widths)


def load_rows(source: Any, tokens: int) -> jax.Array:
    """One number a weight row, [ROWS] in device memory, as float32 [ROWS, tokens]."""
    one = plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(one.astype(jnp.float32), (ROWS, tokens), (0,))


def store_tokens_first(
    out: Any, buffer: Any, tile: jax.Array, *, arranged: bool = False, interpret: Any = None
) -> None:
    """Writes tile [ROWS, tokens] to `out` [tokens, ROWS] in device memory, as far as that has rows.

    `buffer` is shared memory of out's shape and dtype. With `arranged` the rows are in the order in
    which a product with mxfp4 weights takes them as columns.
    """
    if arranged:
        weight_tiles_mxfp4.store_arranged(buffer, tile, interpret)
    else:
        buffer.T[...] = plgpu.layout_cast(tile.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out)
    plgpu.wait_smem_to_gmem(0)


def each_step(
    first: Any, count: Any, last: Any, stages: int, fetch, visit, carry: Any, *, fence: bool
) -> Any:
    """Runs `carry = visit(step, slot, carry)` for `count` steps from `first` on.

    `fetch(step, slot)` is started `stages` steps ahead, up to step `last`; the caller has fetched the
    first `stages` steps of all. `slot` is where a step's tiles lie. `fence` orders threads' own reads
    of a slot before the copy that overwrites it; tensor cores' reads need none.
    """

    def body(i, carry):
        i = first + i
        slot = lax.rem(i, stages)
        carry = visit(i, slot, carry)

        @pl.when(i + stages < last)
        def _():
            if fence:
                plgpu.commit_smem()
            fetch(i + stages, slot)

        return carry

    return lax.fori_loop(0, count, body, carry)
