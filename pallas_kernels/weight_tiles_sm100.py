"""Tiles of weights inside a Blackwell kernel: 128 rows, unpacked ones from tensor memory.

A thread has a row of the weight of its own: it unpacks 64 columns at a time and stores them to tensor memory,
where they are the first operand of tcgen05's product. There is room for two such pieces, so that one is
multiplied while the next is unpacked. Products are added up in tensor memory over one step of columns, and over
steps in registers, as `weight_tiles` says.
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
"""Columns that are unpacked and multiplied at once."""

_NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE
_STORED = _NATIVE(2)  # as tensor memory has bfloat16
_PACKED = _NATIVE(16)  # as shared memory is read without conflicts: 16 bytes of a row
_GROUPS = PIECE // GROUP


class Format(weight_tiles.Format):
    rows = 128
    layout = plgpu.Layout.TCGEN05
    transposed = plgpu.Layout.TCGEN05_TRANSPOSED

    def scratch(
        self, stages: int, parts: int, tokens: int, K: int, out_dtype: jnp.dtype, groups: int = 1
    ) -> dict[str, Any]:
        found = super().scratch(stages, parts, tokens, K, out_dtype, groups)
        # Products of one step, and two pieces with the barriers of their products.
        found["sums"] = plgpu.TMEM((self.rows, parts * tokens), jnp.float32)
        found["done"] = plgpu.Barrier(num_barriers=2, orders_tensor_core=True)
        if self.unpacked:
            found["pieces"] = plgpu.TMEM((self.rows, 2 * PIECE), jnp.bfloat16, packed=True)
        return found

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
        sums, done, pieces = memory["sums"], memory["done"], memory.get("pieces")
        tokens = x.shape[0]
        accs = [sums.at[:, part * tokens : (part + 1) * tokens] for part in range(len(tiles))]
        started = 0
        if self.unpacked:
            for part, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                unpack = self._unpacker(tile, scales[part] if scales else None, step, interpret)
                for piece in range(self.step // PIECE):
                    slot = started % 2
                    if started >= 2:
                        plgpu.barrier_wait(done.at[slot])
                    for group in range(_GROUPS):
                        columns = _span(slot * _GROUPS + group, GROUP)
                        plgpu.async_store_tmem(
                            pieces.at[:, columns], unpack(piece * _GROUPS + group)
                        )
                    plgpu.commit_tmem()
                    plgpu.tcgen05_mma(
                        acc,
                        pieces.at[:, _span(slot, PIECE)],
                        x.at[:, _span(piece, PIECE)].T,
                        done.at[slot],
                        accumulate=piece > 0,
                    )
                    started += 1
        else:
            for part, (tile, acc) in enumerate(zip(tiles, accs, strict=True)):
                plgpu.tcgen05_mma(acc, tile, x.T, done.at[part], accumulate=False)
                started += 1
        for slot in range(min(started, 2)):
            plgpu.barrier_wait(done.at[slot])
        # Before sums are loaded: afterwards they would wait in registers beside the totals.
        refill()
        return self.add(totals, factors, self._load(accs))

    def _load(self, accs: Sequence[Any]) -> Iterator[jax.Array]:
        for acc in accs:
            yield plgpu.async_load_tmem(acc, layout=self.layout)
        plgpu.wait_load_tmem()  # the next step overwrites them

    def _unpacker(self, tile: Any, scales: Any, step: Any, interpret: Any) -> Callable:
        """Reads a tile; the result makes bfloat16 [rows, GROUP] of the columns of one group."""
        packed = plgpu.load(tile, layout=_PACKED, optimized=False)
        if self.kind == "fp8":
            # As on Hopper, through float32. Few columns at a time, for they fill registers.
            wide = lambda group: packed[:, _span(group, GROUP)].astype(jnp.float32)
            return lambda group: plgpu.layout_cast(wide(group).astype(jnp.bfloat16), _STORED)
        codes = weight_tiles_mxfp4.load_scales(
            scales, self.rows, step, interpret, _STORED.reduce(1)
        )
        if interpret is not None:
            made = weight_tiles_mxfp4.interpreted(packed, codes).astype(jnp.bfloat16)
            return lambda group: made[:, _span(group, GROUP)]
        return lambda group: _unpack_mxfp4(packed, codes[group], group)

    def pad_rows(self, x: jax.Array | None, axis: int = -1) -> jax.Array | None:
        return x

    def load_rows(self, source: Any, first: Any, tokens: int, interpret: Any) -> jax.Array:
        """Past N it is the last one: models have matrices of half a tile more than whole tiles."""
        last = source.shape[0] - 1
        layout = self.layout.reduce(1)
        if interpret is not None:
            one = source[...][jnp.minimum(first + jnp.arange(self.rows), last)]
        else:

            @plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
                return_type=plgpu.ShapeDtypeStruct((self.rows,), source.dtype, layout=layout),
            )
            def load(_, source, first):
                return _load_clamped(source, first, last, self.rows, layout.to_mgpu())

            one = load(source, first)
        return lax.broadcast_in_dim(one.astype(jnp.float32), (self.rows, tokens), (0,))


def _load_clamped(source: Any, first: Any, last: int, rows: int, layout: Any) -> Any:
    """Numbers first .. first + rows - 1 of `source`, `last` for those after it, as one thread has them."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, memref, vector

    index = ir.IndexType.get()
    first = arith.index_cast(index, first.registers.item())
    registers = []
    for (row,) in layout.thread_idxs((rows,)):
        row = arith.minui(arith.addi(first, row), mgpu.c(last, index))
        one = memref.load(source, [row])
        registers.append(vector.broadcast(ir.VectorType.get((1,), one.type), one))
    out = np.empty(layout.registers_shape((rows,)), dtype=object)
    out.flat = registers
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def _span(i: int, size: int) -> slice:
    return slice(i * size, (i + 1) * size)


def _unpack_mxfp4(words: jax.Array, code: jax.Array, group: int) -> jax.Array:
    """uint8 [rows, STEP / 2] and the scale of a group [rows]: bfloat16 [rows, GROUP], arranged."""
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
            weight_tiles_mxfp4.pairs_of(mgpu.utils.vector_slice(four, slice(j, j + 1)), factor)
            for j in range(4)
        ]
        layout = _STORED.to_mgpu()
        out = np.empty(layout.registers_shape(shape), dtype=object)
        out.flat = [pairs[j][i] for i in range(4) for j in range(4)]
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return unpack(words, code)
