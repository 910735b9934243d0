"""The tiles of one weight in a GEMM kernel: `Format`, its shared memory, and the copies in and out.

Quantised weights are stored in device memory at 4 or 8 bits and converted to the dtype of the
activations, bfloat16 or float16, on the way to the tensor cores. Products have float32
accumulation. With quantised activations (`pallas_kernels.activations`) fp8 tiles are multiplied as
they are stored; Hopper's FP8 MMA accumulates with fewer bits, so each step is added to a float32
total.

    TMA              w_smem, x_smem -> codec: operands -> MMA: product of one step    [rows, tokens]
    each step        total += factor * product         (factor: block scale, or a constant)
    each chunk       total times the scales of rows, if rows have scales
    after K          total, in registers -> out_smem (transposed) -> TMA              [tokens, rows]

The order of a sum depends only on K and on the number of K chunks, not on the number of rows in the
call. `pipeline` describes how TMA runs ahead of the MMA.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats, fp8_tiles
from pallas_kernels.device import Device
from pallas_kernels.rounded_product import rounded_product
from pallas_kernels.weight_tiles import mxfp4
from pallas_kernels.weight_tiles.codecs import Codec, codec_of, codec_of_kind
from pallas_kernels.weight_tiles.mma import Mma, Operands
from pallas_kernels.weight_tiles.mma_sm90 import Wgmma
from pallas_kernels.weight_tiles.mma_sm100 import Tcgen05

_SWIZZLE = 128  # bytes
_SLOT_SCALES = 32
"""Fewest scales of x in a slot: TMA writes to multiples of 128 bytes."""
_MMAS = {90: Wgmma(), 100: Tcgen05()}


def swizzled(dtype: jnp.dtype) -> tuple:
    """Shared-memory layout without bank conflicts: 128-byte swizzle of tiles of 8 rows."""
    columns = _SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_SWIZZLE))


@dataclass(frozen=True)
class Format:
    """A weight's storage on one chip: how its bits become operands, and what multiplies them."""

    codec: Codec
    mma: Mma

    @classmethod
    def of(
        cls,
        values: jax.Array,
        scale: jax.Array | None,
        device: Device,
        x_dtype: jnp.dtype = jnp.bfloat16,
    ) -> "Format":
        """Format of a weight; the arrays need only a shape and a dtype. Arguments as in
        `codec_of`."""
        return cls(codec_of(values, scale, x_dtype), _MMAS[device.sm])

    @classmethod
    def of_kind(
        cls, kind: formats.Kind, device: Device, x_dtype: jnp.dtype = jnp.bfloat16
    ) -> "Format":
        return cls(codec_of_kind(kind, x_dtype), _MMAS[device.sm])

    @property
    def rows(self) -> int:
        """Weight rows of one tile."""
        return self.mma.rows

    def stages(self, wanted: int, num_steps: int, most: int) -> int:
        """Pipeline stages, at least two. `wanted` counts stages of 64 rows; larger tiles get
        fewer."""
        return min(max(2, wanted * 64 // self.rows), num_steps, most)

    def most_stages(
        self, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int, device: Device
    ) -> int:
        """Most stages that fit into the shared memory of a block; arguments as in `scratch`.

        Raises:
          NotImplementedError: not even one fits.
        """
        rest, slot = self._block_bytes(parts, tokens, K, out_dtype, groups)
        rest += 2048  # barriers, alignment
        most = (device.smem_bytes - rest) // slot
        if most < 1:
            raise NotImplementedError(
                f"tiles of {tokens} rows and a weight with {K} columns need {rest + slot} bytes of "
                f"shared memory and a thread block of {device} has {device.smem_bytes} bytes; "
                "use implementation='reference'"
            )
        return most

    def resident_blocks(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, device: Device
    ) -> int:
        """Blocks of one warpgroup for which a multiprocessor has shared memory; registers may allow
        fewer. Arguments as in `scratch`."""
        rest, slot = self._block_bytes(parts, tokens, K, out_dtype, groups=1)
        own = 1024  # what the chip keeps of each block
        return (device.smem_bytes + own) // (rest + stages * slot + own + 128)  # barriers

    def _block_bytes(
        self, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int
    ) -> tuple[int, int]:
        """Shared memory of a block: without slots, and of each slot; arguments as in `scratch`."""
        stored = self._stored(tokens, groups) * jnp.dtype(out_dtype).itemsize
        rest = groups * self.rows * (parts * self.codec.staged_scales(K) + stored)
        scale = 4 * max(tokens, _SLOT_SCALES) if self.codec.x_scaled else 0
        x = tokens * self.codec.step * self.codec.x_dtype.itemsize + scale
        return rest, groups * parts * self.rows * self.codec.row_bytes + x

    def scratch(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int = 1
    ) -> dict[str, Any]:
        """Scratch of a block: slots and barriers of a pipeline, staged scales, and the output tile.

        If warpgroups share x, each has its own weight slots, scales and output tile. The MMA may
        add to it, see `Mma.scratch`.

        Args:
          stages: slots of the pipeline.
          parts: weights that share x: 2 for gate and up.
          tokens: tokens of a tile.
          K: columns of the weight.
          out_dtype: dtype of the output tile.
          groups: warpgroups of the block.
        """
        codec = self.codec
        transforms = swizzled(codec.dtype)
        if codec.staged:  # no tiling: K / 2 may not be a multiple of the tile width
            transforms = transforms[1:]
        tile = self.rows, codec.width
        if codec.tiled:  # bulk copies and loads of whole 16 bytes: no swizzle
            transforms, tile = (), fp8_tiles.LOADS
        shared = groups > 1
        out = (self._stored(tokens, groups), self.rows)
        w, x = (groups * stages, parts, *tile), (stages, tokens, codec.step)
        copies_x = 1 + codec.x_scaled
        arrivals = parts + (0 if shared else copies_x)
        scratch = dict(
            # [(groups,) stored tokens, rows] out_dtype
            out_smem=plgpu.SMEM((groups, *out) if shared else out, out_dtype),
            w_smem=plgpu.SMEM(w, codec.dtype, transforms=transforms),
            x_smem=plgpu.SMEM(x, codec.x_dtype, transforms=swizzled(codec.x_dtype)),
            ready_barrier=plgpu.Barrier(num_arrivals=arrivals, num_barriers=groups * stages),
        )
        if codec.x_scaled:
            slot = max(tokens, _SLOT_SCALES)
            scratch["x_scale_smem"] = plgpu.SMEM((stages, slot), jnp.float32)
        if shared:
            scratch["x_ready_barrier"] = plgpu.Barrier(num_arrivals=copies_x, num_barriers=stages)
            scratch["x_free_barrier"] = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
        if codec.staged:
            scales = (groups * parts, self.rows * codec.staged_scales(K))
            scratch["scale_smem"] = plgpu.SMEM(scales, jnp.uint8)
            scratch["scales_ready_barrier"] = plgpu.Barrier(num_arrivals=parts, num_barriers=groups)
        return scratch | self.mma.scratch(codec, parts, tokens)

    def _stored(self, tokens: int, groups: int) -> int:
        """Tokens of the output tile that are in shared memory at once during the epilogue."""
        piece = tokens // self.mma.pieces(self.codec, tokens, groups)
        most = min(piece, 64, 128 // groups // 8 * 8)
        return next(n for n in range(most, 0, -8) if piece % n == 0)

    def kernel_scale(self, scale: jax.Array | None) -> jax.Array | None:
        """The scale as a kernel operand. No copy for the shapes of supported models."""
        if scale is None:
            return None
        if self.codec.staged:
            return scale.reshape(-1)
        return self.mma.pad_rows(scale, -2) if self.codec.row_scaled else scale

    def kernel_values(self, values: jax.Array) -> jax.Array:
        """The values as a kernel operand; no copy."""
        return values.reshape(*values.shape[:-1], *fp8_tiles.LOADS) if self.codec.tiled else values

    def fetch_weight(
        self, w_gmem: Any, first_row: Any, step: Any, tile_smem: Any, barrier: Any
    ) -> None:
        """Starts the copy of the tile of a step, from row `first_row` of a weight [N, K] on.

        Elements outside of the weight are filled with zeros. A tile that is stored whole is never
        outside: steps past the last one read it again, and the columns of x that they multiply are
        zeros.
        """
        if self.codec.tiled:
            last = w_gmem.shape[-3] - 1
            tile_gmem = w_gmem.at[lax.div(first_row, self.rows), jnp.minimum(step, last)]
            bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(tile_gmem, tile_smem, barrier, oob_mode=bounds)
        else:
            columns = pl.ds(step * self.codec.width, self.codec.width)
            fetch_tile(w_gmem.at[pl.ds(first_row, self.rows), columns], tile_smem, barrier)

    def zeros(self, parts: int, tokens: int, groups: int) -> list[jax.Array]:
        """Initial totals of `parts` tiles for `Mma.add_products`: float32
        [rows, tokens / pieces]."""
        pieces = self.mma.pieces(self.codec, tokens, groups)
        zeros = jnp.zeros((self.rows, tokens // pieces), jnp.float32)
        return [plgpu.layout_cast(zeros, self.mma.layout)] * (parts * pieces)

    def add_products(
        self,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        operands: Operands,
        refill: Callable[[], None],
        interpret: Any,
        **scratch: Any,
    ) -> list[jax.Array]:
        """`total += factor * (tile @ x.T)` for each tile of a step; see `Mma.add_products`."""
        return self.mma.add_products(
            self.codec, totals_reg, factors, operands, refill, interpret, **scratch
        )

    def times_scales(
        self,
        sums_reg: Sequence[jax.Array],
        scale_gmem: Any,
        first_row: Any,
        tokens: int,
        interpret: Any,
    ) -> list[jax.Array]:
        """Sums float32 [rows, tokens / pieces] times scale_gmem[first_row : first_row + rows],
        rounded."""
        width = tokens // len(sums_reg)
        scales_reg = self.mma.load_rows(scale_gmem, first_row, width, interpret)
        layout = self.mma.layout
        return [rounded_product(one, scales_reg, layout, interpret) for one in sums_reg]

    def store_tokens_first(
        self,
        out_gmem: Any,
        out_smem: Any,
        tiles_reg: Sequence[jax.Array],
        *,
        arranged: bool = False,
        interpret: Any = None,
    ) -> None:
        """Epilogue: stores tiles [rows, tokens / pieces] transposed to out_gmem [tokens, rows].

        The tiles pass through out_smem [n, rows], n tokens at a time. TMA clips rows and tokens
        outside of the array. `arranged` permutes the rows as mxfp4 products expect their input
        columns.
        """
        size = out_smem.shape[0]
        parts = [
            _columns(tile, i, size) for tile in tiles_reg for i in range(tile.shape[1] // size)
        ]
        for i, part_reg in enumerate(parts):
            if arranged:
                mxfp4.store_arranged(out_smem, part_reg, self.mma.layout, interpret)
            else:
                part_reg = part_reg.astype(out_gmem.dtype)
                out_smem.T[...] = plgpu.layout_cast(part_reg, self.mma.transposed)
            plgpu.commit_smem()
            target_gmem = out_gmem if len(parts) == 1 else out_gmem.at[pl.ds(i * size, size)]
            plgpu.copy_smem_to_gmem(out_smem, target_gmem)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _columns(tile_reg: jax.Array, i: int, size: int) -> jax.Array:
    return tile_reg if tile_reg.shape[1] == size else tile_reg[:, i * size : (i + 1) * size]


def fetch_tile(source_gmem: Any, tile_smem: Any, barrier: Any) -> None:
    """Starts a TMA copy of a tile; elements outside of the array are filled with zeros."""
    plgpu.copy_gmem_to_smem(source_gmem, tile_smem, barrier, oob_mode=plgpu.OOBFillMode.ZEROS)


def fetch_scales(source_gmem: Any, row: Any, rows: int, scale_smem: Any, barrier: Any) -> None:
    """Starts a bulk copy of the mxfp4 scales of `rows` rows from `row` on.

    source_gmem is uint8 [rows of all weights * K / 32], scale_smem uint8 [rows * K / 32]. One
    contiguous range: a tensor copy needs rows of 16 n bytes. Bytes past the end of the array are
    not written.
    """
    size = scale_smem.shape[0]
    range_gmem = source_gmem.at[pl.ds(row * (size // rows), size)]
    plgpu.copy_gmem_to_smem(range_gmem, scale_smem, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED)
