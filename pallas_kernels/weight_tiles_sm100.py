"""Weight tiles on Blackwell: tcgen05 MMA with 128 weight rows per block.

Each thread of the warpgroup handles one weight row. It unpacks 64 columns ("a piece") and stores them to
tensor memory, from where they are the first operand of the MMA. Two pieces are double-buffered: one is
multiplied while the next is unpacked. Products accumulate in tensor memory within one K step and in
registers across steps, as `weight_tiles` describes.

    TMEM columns   sums: parts * tokens (float32)   pieces: 2 * 64 bfloat16, packed in 64 columns
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import weight_tiles, weight_tiles_mxfp4
from pallas_kernels.formats import GROUP

PIECE = 64
"""K columns of one unpack and one MMA."""

_NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
_STORED = _NATIVE(2)  # registers of a bfloat16 store to tensor memory
_PACKED = _NATIVE(16)  # registers of a shared-memory load of 16 bytes a row: no bank conflicts
_GROUPS = PIECE // GROUP


class Format(weight_tiles.Format):
    rows = 128
    layout = plgpu.Layout.TCGEN05
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED

    def scratch(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int = 1
    ) -> dict[str, Any]:
        scratch = super().scratch(stages, parts, tokens, K, out_dtype, groups)
        scratch["sums_tmem"] = plgpu.TMEM((self.rows, parts * tokens), jnp.float32)
        # One per buffered piece: its MMA has finished.
        scratch["done_barrier"] = plgpu.Barrier(num_barriers=2, orders_tensor_core=True)
        if self.unpacked:
            scratch["pieces_tmem"] = plgpu.TMEM((self.rows, 2 * PIECE), jnp.bfloat16, packed=True)
        return scratch

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
        **scratch: Any,
    ) -> list[jax.Array]:
        sums_tmem, done_barrier = scratch["sums_tmem"], scratch["done_barrier"]
        pieces_tmem = scratch.get("pieces_tmem")
        tokens = x_smem.shape[0]
        accs = [sums_tmem.at[:, part * tokens : (part + 1) * tokens] for part in range(len(tiles))]
        started = 0
        if self.unpacked:
            for part, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                unpack = self._unpacker(tile, scales[part] if scales else None, step, interpret)
                for piece in range(self.step // PIECE):
                    slot = started % 2
                    if started >= 2:
                        plgpu.barrier_wait(done_barrier.at[slot])
                    for group in range(_GROUPS):
                        columns = _span(slot * _GROUPS + group, GROUP)
                        plgpu.async_store_tmem(
                            pieces_tmem.at[:, columns], unpack(piece * _GROUPS + group)
                        )
                    plgpu.commit_tmem()
                    plgpu.tcgen05_mma(
                        acc,
                        pieces_tmem.at[:, _span(slot, PIECE)],
                        x_smem.at[:, _span(piece, PIECE)].T,
                        done_barrier.at[slot],
                        accumulate=piece > 0,
                    )
                    started += 1
        else:
            for part, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                plgpu.tcgen05_mma(acc, tile, x_smem.T, done_barrier.at[part], accumulate=False)
                started += 1
        for slot in range(min(started, 2)):
            plgpu.barrier_wait(done_barrier.at[slot])
        # Refill before the sums are loaded: otherwise the sums stay live in registers beside the totals.
        refill()
        return self.add(totals, factors, self._load(accs))

    def _load(self, accs: Sequence[Any]) -> Iterator[jax.Array]:
        for acc in accs:
            yield plgpu.async_load_tmem(acc, layout=self.layout)
        plgpu.wait_load_tmem()  # the next step overwrites the accumulators

    def _unpacker(self, tile_smem: Any, scales: Any, step: Any, interpret: Any) -> Callable:
        """Loads a tile; returns a function group -> bfloat16 [rows, GROUP] in registers."""
        packed = plgpu.load(tile_smem, layout=_PACKED, optimized=False)
        if self.kind == "fp8":
            # Through float32, as on Hopper. One group at a time limits register pressure.
            wide = lambda group: packed[:, _span(group, GROUP)].astype(jnp.float32)
            return lambda group: plgpu.layout_cast(wide(group).astype(jnp.bfloat16), _STORED)
        codes = weight_tiles_mxfp4.load_scales(
            scales, self.rows, step, interpret, _STORED.reduce(1)
        )
        if interpret is not None:
            weights = weight_tiles_mxfp4.interpreted(packed, codes).astype(jnp.bfloat16)
            return lambda group: weights[:, _span(group, GROUP)]
        return lambda group: _unpack_mxfp4(packed, codes[group], group)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        return x

    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Rows past N get the value of row N - 1: addresses are clamped, so N needs no padding."""
        last = source_gmem.shape[0] - 1
        layout = self.layout.reduce(1)
        if interpret is not None:
            column = source_gmem[...][jnp.minimum(first + jnp.arange(self.rows), last)]
        else:

            @plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
                return_type=plgpu.ShapeDtypeStruct((self.rows,), source_gmem.dtype, layout=layout),
            )
            def load(_, source, first):
                return _load_clamped(source, first, last, self.rows, layout.to_mgpu())

            column = load(source_gmem, first)
        return lax.broadcast_in_dim(column.astype(jnp.float32), (self.rows, tokens), (0,))


def _load_clamped(source: Any, first: Any, last: int, rows: int, layout: Any) -> Any:
    """source[min(first + i, last)] for the rows i of this thread, as a fragmented array [rows]."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, memref, vector

    index = ir.IndexType.get()
    first = arith.index_cast(index, first.registers.item())
    registers = []
    for (row,) in layout.thread_idxs((rows,)):
        row = arith.minui(arith.addi(first, row), mgpu.c(last, index))
        value = memref.load(source, [row])
        registers.append(vector.broadcast(ir.VectorType.get((1,), value.type), value))
    out = np.empty(layout.registers_shape((rows,)), dtype=object)
    out.flat = registers
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def _span(i: int, size: int) -> slice:
    return slice(i * size, (i + 1) * size)


def _unpack_mxfp4(words: jax.Array, code: jax.Array, group: int) -> jax.Array:
    """uint8 [rows, STEP / 2] and a group's scale [rows] -> bfloat16 [rows, GROUP], `arrange` order."""
    shape = (words.shape[0], GROUP)

    @plgpu.inline_mgpu(
        arg_types=(_PACKED, _STORED.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=_STORED),
    )
    def unpack(_, words, code):
        from jax._src.lib.mlir import ir

        quads = ir.VectorType.get((4,), weight_tiles_mxfp4.i32())
        four = mgpu.utils.bitcast(words.registers.flat[group], quads)
        factor = weight_tiles_mxfp4.multiplier(code.registers.item())
        pairs = [
            weight_tiles_mxfp4.unpack_pairs(mgpu.utils.vector_slice(four, slice(j, j + 1)), factor)
            for j in range(4)
        ]
        layout = _STORED.to_mgpu()
        out = np.empty(layout.registers_shape(shape), dtype=object)
        out.flat = [pairs[j][i] for i in range(4) for j in range(4)]
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return unpack(words, code)
