"""Blackwell's tensor cores: tcgen05 with 128 weight rows per block.

Each thread of the warpgroup handles one weight row. It unpacks 64 columns of it and stores them to
tensor memory (TMEM), from where they are the first operand of the MMA. In this file such 64 columns
are a piece; the tokens are divided (`Mma.pieces`) only where each column of a product has a scale.
There are two buffers: one piece is multiplied while the next is unpacked. Products accumulate in
tensor memory within one K step and in registers across steps.

    TMEM columns   sums: parts * tokens (float32)   pieces: 2 * 64 bfloat16, packed in 64 columns
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mlir_compat as mlir
from pallas_kernels.formats import GROUP
from pallas_kernels.weight_tiles import mxfp4
from pallas_kernels.weight_tiles.codecs import Codec
from pallas_kernels.weight_tiles.mma import Mma, Operands, scaled_sums

PIECE = 64
"""K columns of one MMA with unpacked weights."""

_NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
_STORED = _NATIVE(2)  # registers of a bfloat16 store to tensor memory
_PACKED = _NATIVE(16)  # registers of a shared-memory load of 16 bytes a row: no bank conflicts
_GROUPS = PIECE // GROUP


class Tcgen05(Mma):
    rows = 128
    part = GROUP
    layout = plgpu.Layout.TCGEN05
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED

    def pieces(self, codec: Codec, tokens: int, groups: int) -> int:
        # A thread holds the scales of all columns of a piece beside its sums and the totals.
        return 2 if codec.x_scaled and tokens > 32 else 1

    def scratch(self, codec: Codec, parts: int, tokens: int) -> dict[str, Any]:
        scratch = dict(
            sums_tmem=plgpu.TMEM((self.rows, parts * tokens), jnp.float32),
            # One per buffered piece: its MMA has finished.
            done_barrier=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        )
        if codec.unpacked:
            scratch["pieces_tmem"] = plgpu.TMEM((self.rows, 2 * PIECE), jnp.bfloat16, packed=True)
        return scratch

    def add_products(
        self,
        codec: Codec,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        operands: Operands,
        refill: Callable[[], None],
        interpret: Any,
        *,
        sums_tmem: Any,
        done_barrier: Any,
        pieces_tmem: Any = None,
    ) -> list[jax.Array]:
        tiles_smem, x_smem = operands.tiles_smem, operands.x_smem
        accs_tmem = [sums_tmem.at[:, _span(i, x_smem.shape[0])] for i in range(len(tiles_smem))]
        if codec.unpacked:
            load = lambda i: operands.unpacker(codec, self, i, interpret)
            pieces = codec.step // PIECE
            self._multiply_unpacked(accs_tmem, load, pieces, x_smem, pieces_tmem, done_barrier)
        else:
            self._multiply_stored(accs_tmem, tiles_smem, x_smem, done_barrier)
        if codec.x_scaled:
            sums = self._add_scaled(codec, totals_reg, factors, sums_tmem, operands.x_scale_smem)
            refill()
            return sums
        # Refill before the sums are loaded: otherwise the sums stay live in registers beside the
        # totals.
        refill()
        return scaled_sums(codec, totals_reg, factors, self._load_sums(accs_tmem))

    def _add_scaled(
        self,
        codec: Codec,
        totals_reg: Sequence[jax.Array],
        factors: Sequence[jax.Array],
        sums_tmem: Any,
        scale_smem: Any,
    ) -> list[jax.Array]:
        """Adds sums whose columns each have a scale, in scale_smem float32 [tokens], to the
        totals."""
        pieces = len(totals_reg) // len(factors)
        size = scale_smem.shape[0] // pieces
        sums = []
        for i, total in enumerate(totals_reg):
            product = plgpu.async_load_tmem(sums_tmem.at[:, _span(i, size)], layout=self.layout)
            plgpu.wait_load_tmem()
            scale_reg = plgpu.load(
                scale_smem.at[_span(i % pieces, size)],
                layout=self.layout.reduce(0),
                optimized=False,
            )
            if codec.block_scaled:
                scale_reg = scale_reg * factors[i // pieces]
            total = total + product * lax.broadcast_in_dim(scale_reg, product.shape, (1,))
            # Otherwise the compiler loads all sums and scales before the first addition.
            sums.append(lax.optimization_barrier(total))
        return sums

    def _multiply_stored(
        self, accs_tmem: Sequence[Any], tiles_smem: Sequence[Any], x_smem: Any, done_barrier: Any
    ) -> None:
        """Multiplies stored tiles [rows, step] in shared memory, one MMA per tile, and waits for
        them."""
        for i, (tile_smem, acc_tmem) in enumerate(zip(tiles_smem, accs_tmem, strict=True)):
            plgpu.tcgen05_mma(acc_tmem, tile_smem, x_smem.T, done_barrier.at[i], accumulate=False)
        for i in range(len(tiles_smem)):
            plgpu.barrier_wait(done_barrier.at[i])

    def _multiply_unpacked(
        self,
        accs_tmem: Sequence[Any],
        load: Callable[[int], Callable],
        pieces: int,
        x_smem: Any,
        pieces_tmem: Any,
        done_barrier: Any,
    ) -> None:
        """Multiplies tiles through tensor memory, each in `pieces` pieces, and waits for the MMAs.

        `load(i)` is the unpacker of tile i. An MMA reads one half of pieces_tmem while the threads
        store the next piece to the other half.
        """
        started = 0
        for i, acc_tmem in enumerate(accs_tmem):
            unpack = load(i)
            for piece in range(pieces):
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
                    acc_tmem,
                    pieces_tmem.at[:, _span(slot, PIECE)],
                    x_smem.at[:, _span(piece, PIECE)].T,
                    done_barrier.at[slot],
                    accumulate=piece > 0,
                )
                started += 1
        for slot in range(2):
            plgpu.barrier_wait(done_barrier.at[slot])

    def _load_sums(self, accs_tmem: Sequence[Any]) -> Iterator[jax.Array]:
        """Sums of a step, float32 [rows, tokens] in registers."""
        for acc_tmem in accs_tmem:
            yield plgpu.async_load_tmem(acc_tmem, layout=self.layout)
        plgpu.wait_load_tmem()  # the next step overwrites the accumulators

    def unpack_fp8(self, tile_smem: Any) -> Callable[[int], jax.Array]:
        packed_reg = plgpu.load(tile_smem, layout=_PACKED, optimized=False)

        def unpack(group: int) -> jax.Array:
            # Through float32, as on Hopper. One group at a time limits register pressure.
            wide_reg = packed_reg[:, _span(group, GROUP)].astype(jnp.float32)
            return plgpu.layout_cast(wide_reg.astype(jnp.bfloat16), _STORED)

        return unpack

    def unpack_mxfp4(
        self, tile_smem: Any, scales_smem: Any, step: Any, interpret: Any
    ) -> Callable[[int], jax.Array]:
        words_reg = plgpu.load(tile_smem, layout=_PACKED, optimized=False)
        codes_reg = mxfp4.load_scales(scales_smem, self.rows, step, interpret, _STORED.reduce(1))
        if interpret is not None:
            weights = mxfp4.interpreted(words_reg, codes_reg).astype(jnp.bfloat16)
            return lambda group: weights[:, _span(group, GROUP)]
        return lambda group: _unpack_group(words_reg, codes_reg[group], group)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        """Nothing to pad, see `load_rows`."""
        return x

    def load_rows(self, source_gmem: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Rows past N get the value of row N - 1: addresses are clamped, so N needs no padding."""
        last = source_gmem.shape[0] - 1
        layout = self.layout.reduce(1)
        if interpret is not None:
            column_reg = source_gmem[...][jnp.minimum(first + jnp.arange(self.rows), last)]
        else:

            @plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
                return_type=plgpu.ShapeDtypeStruct((self.rows,), source_gmem.dtype, layout=layout),
            )
            def load(_, source, first):
                return _load_clamped(source, first, last, self.rows, layout.to_mgpu())

            column_reg = load(source_gmem, first)
        return lax.broadcast_in_dim(column_reg.astype(jnp.float32), (self.rows, tokens), (0,))


def _load_clamped(source: Any, first: Any, last: int, rows: int, layout: Any) -> Any:
    """source[min(first + i, last)] for the rows i of this thread, as a fragmented array [rows]."""
    index = mlir.ir.IndexType.get()
    first = mlir.arith.index_cast(index, first.registers.item())
    registers = []
    for (row,) in layout.thread_idxs((rows,)):
        row = mlir.arith.minui(mlir.arith.addi(first, row), mlir.constant(last, index))
        value = mlir.memref.load(source, [row])
        registers.append(mlir.vector.broadcast(mlir.ir.VectorType.get((1,), value.type), value))
    out = np.empty(layout.registers_shape((rows,)), dtype=object)
    out.flat = registers
    return mlir.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def _span(i: int, size: int) -> slice:
    return slice(i * size, (i + 1) * size)


def _unpack_group(words_reg: jax.Array, code_reg: jax.Array, group: int) -> jax.Array:
    """uint8 [rows, STEP / 2] and a group's scale [rows] -> bfloat16 [rows, GROUP], `arrange`
    order."""
    shape = (words_reg.shape[0], GROUP)

    @plgpu.inline_mgpu(
        arg_types=(_PACKED, _STORED.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=_STORED),
    )
    def unpack(_, words, code):
        quads = mlir.ir.VectorType.get((4,), mlir.i32())
        four = mlir.bitcast(words.registers.flat[group], quads)
        factor = mxfp4.multiplier(code.registers.item())
        pairs = [
            mxfp4.unpack_pairs(mlir.vector_slice(four, slice(j, j + 1)), factor) for j in range(4)
        ]
        layout = _STORED.to_mgpu()
        out = np.empty(layout.registers_shape(shape), dtype=object)
        out.flat = [pairs[j][i] for i in range(4) for j in range(4)]
        return mlir.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return unpack(words_reg, code_reg)
