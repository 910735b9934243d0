"""Tiles of weights inside a kernel: how each format is fetched, unpacked and multiplied.

Weights are the M operand of the product (64 rows on Hopper, 128 on Blackwell), tokens the N operand
("swap-AB"): with few tokens no part of the tensor core is wasted on padding. A weight is unpacked to bfloat16
in registers, so it streams from memory at its own width and the product is that of bfloat16 activations,
exactly rounded factors and float32 sums. (Hopper's FP8 product keeps fewer bits, and activations would have
to be quantised.)

Every step of columns the partial product is multiplied by the block's scale and added to a float32 total.
(Mxfp4's scales are in the unpacked weights already, see `weight_tiles_mxfp4`.)
A sum over K therefore depends on K and the number of chunks alone, never on the rows in the call.

Here is what chips share. What they multiply with is a `Format` of each: `weight_tiles_sm90`,
`weight_tiles_sm100`; `weight_chips` has the choice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, weight_tiles_mxfp4

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
      rows: of the weight in one tile.
      layout: of products [rows, tokens] in registers, and `transposed`, in which they are written.
    """

    kind: formats.Kind
    per_row: bool = False
    rows: ClassVar[int]
    layout: ClassVar[plgpu.Layout]
    transposed: ClassVar[plgpu.Layout]

    @classmethod
    def of(cls, values: jax.Array, scale: jax.Array | None) -> Self:
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

    def stages(self, wanted: int, num_steps: int) -> int:
        """Steps in flight, at least two: as many bytes as in `wanted` steps of 64 rows of the weight."""
        return min(max(2, wanted * 64 // self.rows), num_steps)

    def scratch(self, stages: int, parts: int, tokens: int, K: int) -> dict[str, Any]:
        """Memory of a block: w_s for weights, x_s for bfloat16 activations, scales if they are staged.

        What a chip has beside these is for its `products`.
        """
        transforms = swizzled(self.dtype)
        if self.kind == "mxfp4":  # K / 2 need not be a multiple of a tile's width
            transforms = transforms[1:]
        found = dict(
            w_s=plgpu.SMEM(
                (stages, parts, self.rows, self.width), self.dtype, transforms=transforms
            ),
            x_s=plgpu.SMEM(
                (stages, tokens, self.step), jnp.bfloat16, transforms=swizzled(jnp.bfloat16)
            ),
            ready=plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
        )
        if self.staged:
            found["scale_s"] = plgpu.SMEM((parts, self.rows * (K // formats.GROUP)), jnp.uint8)
            found["scales_ready"] = plgpu.Barrier(num_arrivals=parts)
        return found

    def kernel_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """The scale as kernels take it; nothing is copied for shapes that models have."""
        if self.staged:
            return scale.reshape(-1)
        return self.pad_rows(scale, -2) if self.per_row else scale

    def arrange(self, x: jax.Array) -> jax.Array:
        """Activations [.., K] with columns in the order in which `products` takes them."""
        return weight_tiles_mxfp4.arrange(x) if self.kind == "mxfp4" else x

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
        **memory: Any,
    ) -> list[jax.Array]:
        """Totals, float32 [rows, tokens], plus each tile [rows, step] times x [tokens, step].

        Tiles and x are in shared memory, x arranged; `refill()` is called when they are not needed any more.
        Factors multiply products where tiles have scales: those of fp8 blocks, or `TOTAL` for mxfp4.
        Of mxfp4 `scales` are those of each tile's rows, [rows * K / 32] in shared memory, and the tiles are
        number `step` along K. `memory` is what `scratch` asked for beside the common parts.
        """
        raise NotImplementedError

    def add(
        self,
        totals: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        products: Iterable[jax.Array],
    ) -> list[jax.Array]:
        """For `add_products`: one product after the other, as they come."""
        scaled = self.in_blocks or self.staged
        return [
            total + (product * factor if scaled else product)
            for total, product, factor in zip(totals, products, factors, strict=True)
        ]

    def zeros(self, tokens: int) -> jax.Array:
        """float32 [rows, tokens] in the products' layout."""
        return plgpu.layout_cast(jnp.zeros((self.rows, tokens), jnp.float32), self.layout)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """One number a weight row, as `load_rows` needs it."""
        raise NotImplementedError

    def load_rows(self, source: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Numbers of a tile's rows, which `source` [N] in device memory has from `first` on.

        As float32 [rows, tokens]; of rows past N they may be anything.
        """
        raise NotImplementedError

    def store_tokens_first(
        self,
        out: Any,
        buffer: Any,
        tile: jax.Array,
        *,
        arranged: bool = False,
        interpret: Any = None,
    ) -> None:
        """Writes tile [rows, tokens] to `out` [tokens, rows] in device memory, as far as that has rows.

        `buffer` is shared memory of out's shape and dtype. With `arranged` the rows are in the order in
        which a product with mxfp4 weights takes them as columns.
        """
        if arranged:
            weight_tiles_mxfp4.store_arranged(buffer, tile, self.layout, interpret)
        else:
            buffer.T[...] = plgpu.layout_cast(tile.astype(out.dtype), self.transposed)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out)
        plgpu.wait_smem_to_gmem(0)


def fetch_tile(source: Any, tile: Any, ready: Any) -> None:
    """Starts copying `source` into shared memory; what lies outside of its array becomes zeros."""
    plgpu.copy_gmem_to_smem(source, tile, ready, oob_mode=plgpu.OOBFillMode.ZEROS)


def fetch_scales(source: Any, row: Any, rows: int, scales: Any, ready: Any) -> None:
    """Starts copying mxfp4 scales of a tile's rows, from the given one on, into shared memory.

    As contiguous bytes: for a tensor copy each row would have to be a multiple of 16 bytes. What lies
    past the array is left as it is.

    Args:
      source: device memory, uint8 [rows of all weights * K / 32].
      scales: [rows * K / 32].
    """
    size = scales.shape[0]
    here = source.at[pl.ds(row * (size // rows), size)]
    plgpu.copy_gmem_to_smem(here, scales, ready, oob_mode=plgpu.OOBFillMode.UNDEFINED)


def each_step(
    first: Any, count: Any, last: Any, stages: int, fetch, visit, carry: Any, *, fence: bool
) -> Any:
    """Runs `carry = visit(step, slot, refill, carry)` for `count` steps from `first` on.

    `fetch(step, slot)` is started `stages` steps ahead, up to step `last`, when `visit` calls `refill()`; the
    caller has fetched the first `stages` steps of all. `slot` is where a step's tiles lie. `fence` orders
    threads' own reads of a slot before the copy that overwrites it; tensor cores' reads need none.
    """

    def body(i, carry):
        i = first + i
        slot = lax.rem(i, stages)

        def refill():
            @pl.when(i + stages < last)
            def _():
                if fence:
                    plgpu.commit_smem()
                fetch(i + stages, slot)

        return visit(i, slot, refill, carry)

    return lax.fori_loop(0, count, body, carry)
