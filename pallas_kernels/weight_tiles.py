"""Tiles of weights inside a Hopper kernel: how each format is fetched, unpacked and multiplied.

Weights are the M operand of the product (64 rows a warpgroup), tokens the N operand ("swap-AB"): with few
tokens no part of the tensor core is wasted on padding. A weight is unpacked to bfloat16 in registers, so it
streams from memory at its own width and the product is that of bfloat16 activations, exactly
rounded factors and float32 sums. (Hopper's FP8 product keeps fewer bits, and activations would have to be
quantised.)

Every `STEP` columns the partial product is multiplied by the block's scale and added to a float32 total.
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

from pallas_kernels import formats

ROWS = 64
"""Weight rows of one tile: what one warpgroup multiplies."""
STEP = 128
"""Columns (of the sum) of one tile; `formats.BLOCK`, so that a tile has one fp8 scale."""

_SWIZZLE = 128  # bytes


def swizzled(dtype: jnp.dtype) -> tuple:
    """Transforms of a shared-memory tile that tensor cores and TMA both read without conflicts."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))


def activations(stages: int, tokens: int) -> Any:
    """Shared memory for `stages` tiles of bfloat16 activations [tokens, STEP]."""
    return plgpu.SMEM((stages, tokens, STEP), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))


@dataclass(frozen=True)
class Format:
    """How one weight is stored, as a kernel needs to know it.

    Attributes:
      kind: see `formats`.
      per_row: fp8 only: one scale a row ([N, 1] or [N, K / 128]) rather than one a block.
      per_step: fp8 only: the scale changes along K.
    """

    kind: formats.Kind
    per_row: bool = False
    per_step: bool = False

    @classmethod
    def of(cls, values: jax.Array, scale: jax.Array | None) -> "Format":
        kind = formats.kind(values, scale)
        if kind != "fp8":
            return cls(kind)
        N = values.shape[-2]
        return cls(kind, per_row=scale.shape[-2] == N, per_step=scale.shape[-1] > 1)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float8_e4m3fn if self.kind == "fp8" else jnp.bfloat16)

    @property
    def unpacked(self) -> bool:
        """Whether threads read the tiles, rather than tensor cores."""
        return self.kind != "plain"

    def buffer(self, *leading: int) -> Any:
        """Shared memory for tiles [*leading, ROWS, STEP]."""
        return plgpu.SMEM((*leading, ROWS, STEP), self.dtype, transforms=swizzled(self.dtype))

    def products(
        self, tiles: Sequence[Any], x: Any, tokens: int, interpret: Any
    ) -> list[jax.Array]:
        """Each tile [ROWS, STEP] times x [tokens, STEP], all in shared memory: float32 [ROWS, tokens]."""
        if interpret is not None and self.unpacked:
            # The interpreter multiplies shared memory only.
            wide = x[...].astype(jnp.float32).T
            return [jnp.dot(_unpack(tile).astype(jnp.float32), wide) for tile in tiles]

        def multiply(*accs):
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


def store_tokens_first(out: Any, buffer: Any, tile: jax.Array) -> None:
    """Writes tile [ROWS, tokens] to `out` [tokens, ROWS] in device memory, as far as that has rows.

    `buffer` is shared memory of out's shape and dtype.
    """
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
