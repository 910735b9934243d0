"""Mxfp4 tiles inside a kernel: 4-bit values become bfloat16 in registers.

A Hopper thread reads 32 bits, 8 neighbours in a row: columns 8j .. 8j + 7 of 32, where j = 0 .. 3 counts the
four threads of a row. A tensor core wants other columns from that thread. No value is exchanged between
threads for it: a sum over columns may run in any order, so activations are stored in the order in which
weights are unpacked. That order is `arrange`'s: in each 32 columns, place 8i + 2j + h holds column
8j + 4h + i. (i = 0 .. 3 counts the pairs that a thread takes out of its 32 bits; the halves h of a pair lie
16 bits apart, so that few instructions put both where bfloat16 has its sign, exponent and mantissa.) A
Blackwell thread reads whole rows, all j of them, and keeps that order for the sake of the pairs.

Scales: e2m1's exponent and mantissa in bfloat16's place are the value times 2^-126, subnormal ones
included, and one product with 2^(126 - SHIFT) times the group's scale makes them the weight times 2^-SHIFT.
Float32 sums are multiplied by 2^SHIFT. That is exact for scale codes from 59 to 192 (2^-68 to 2^65).
Weights with lower codes are rounded to multiples of 2^-69; codes above 192, NaN's 255 too, count as 192.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats

STEP = 256
"""Columns (of the sum) of one tile: 128 bytes a row."""
GROUPS = STEP // formats.GROUP
"""Scales that one row of a tile has."""
SHIFT = 64
TOTAL = 2.0**SHIFT
"""What a sum of products with unpacked weights is to be multiplied by."""

_HALF = STEP // 2  # columns unpacked at once, which bounds the registers that they take
_MOST = 254 - 126 + SHIFT  # the scale code whose multiplier has the largest exponent
_ROW = plgpu.Layout.WGMMA.reduce(1)  # Hopper's layout of one number a row


def arrange(x: jax.Array) -> jax.Array:
    """[..., K] with K's columns in the order in which weights are unpacked; K is a multiple of 32."""
    pairs = x.reshape(*x.shape[:-1], -1, 4, 2, 4)  # [.., K / 32, j, h, i]
    return jnp.moveaxis(pairs, -1, -3).reshape(x.shape)


def load_scales(
    scales: Any, rows: int, step: Any, interpret: Any, layout: Any = _ROW
) -> list[jax.Array]:
    """The scales of one tile, GROUPS arrays uint8 [rows] in the given layout.

    Past K, where weights are zeros, they are those of the last group: anything finite would do.

    Args:
      scales: shared memory [rows * K / 32], uint8.
      step: which tile of STEP columns.
    """
    shape = (rows, scales.shape[0] // rows)
    last = shape[1] - 1
    columns = [jnp.minimum(step * GROUPS + group, last) for group in range(GROUPS)]
    if interpret is not None:
        both = scales[...].reshape(shape)
        return [lax.dynamic_index_in_dim(both, column, 1, keepdims=False) for column in columns]

    # By hand, because a column is not contiguous, which layout inference does not take.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * GROUPS),
        return_type=[plgpu.ShapeDtypeStruct((rows,), jnp.uint8, layout=layout)] * GROUPS,
    )
    def load(_, scales, *columns):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith

        scales = mgpu.utils.memref_reshape(scales, shape)

        def one(column):
            column = arith.index_cast(ir.IndexType.get(), column.registers.item())
            return mgpu.FragmentedArray.load_untiled(
                mgpu.utils.memref_slice(scales, (slice(None), column)),
                layout=layout.to_mgpu(),
                is_signed=False,
                optimized=False,
            )

        return [one(column) for column in columns]

    return load(scales, *columns)


def multiply(accs: Any, tiles: Any, scales: Any, step: Any, x: Any) -> None:
    """Starts adding tiles times x to accumulators: sums to be multiplied by `TOTAL`.

    Args:
      accs: float32 [rows, tokens], one a tile.
      tiles: shared memory [rows, STEP / 2], uint8.
      scales: of each tile's rows, and step: see `load_scales`.
      x: shared memory [tokens, STEP], bfloat16, arranged.
    """
    rows, tokens = accs[0].shape
    for acc, tile, one in zip(accs, tiles, scales, strict=True):
        codes = load_scales(one, rows, step, None)
        words = plgpu.load(tile, layout=plgpu.Layout.WGMMA_8BIT)
        for half in range(2):
            columns = x.at[:, half * _HALF : (half + 1) * _HALF]
            plgpu.wgmma(acc, _unpack(words, codes, half), columns.T)
            # Unpacked weights stay in registers until they are multiplied. One product runs while the
            # next is unpacked; with many tokens sums leave no room for that.
            plgpu.wgmma_wait(1 if tokens <= 32 else 0)


def interpreted(tile: jax.Array, scales: list[jax.Array]) -> jax.Array:
    """float32 [rows, STEP] that `multiply` multiplies, by the same bit operations on whole tiles."""
    words = lax.bitcast_convert_type(tile.reshape(tile.shape[0], -1, 4), jnp.int32)
    pairs = []
    for group, codes in enumerate(scales):
        code = jnp.minimum(codes.astype(jnp.int32), _MOST)[:, None]
        factor = lax.bitcast_convert_type((code + 126 - SHIFT) << 23, jnp.float32) * 2.0**-126
        here = words[:, 4 * group : 4 * group + 4]
        for i in range(4):
            bits = _place(here, i)
            for half in (bits << 16, bits & np.int32(-0x10000)):
                size = half & np.int32(2**31 - 1)
                normal = lax.bitcast_convert_type(size + (126 << 23), jnp.float32)
                value = jnp.where(size < 1 << 23, size.astype(jnp.float32) * 2.0**-23, normal)
                pairs.append(jnp.where(half < 0, -value, value) * factor)
    # [rows, group, i, h, j] -> [rows, group, i, j, h]
    made = jnp.stack(pairs, 1).reshape(-1, GROUPS, 4, 2, 4)
    return jnp.swapaxes(made, -1, -2).reshape(-1, STEP)


def store_arranged(buffer: Any, tile: jax.Array, layout: plgpu.Layout, interpret: Any) -> None:
    """Writes tile [rows, tokens], which has `layout`, to shared memory [tokens, rows], rows arranged."""
    tile = tile.astype(buffer.dtype)
    if interpret is not None:
        buffer[...] = arrange(tile.T)
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def scatter(_, tile, buffer):
        from jax._src.lib.mlir.dialects import arith, memref

        def put(value, at):
            row, token = at
            index = lambda n: mgpu.c(n, row.type)
            bits = lambda low, size, to: arith.muli(
                arith.remui(arith.divui(row, index(low)), index(size)), index(to)
            )
            # Row 32b + 8j + 4h + i goes to place 32b + 8i + 2j + h.
            place = arith.muli(arith.divui(row, index(32)), index(32))
            for part in (bits(1, 4, 8), bits(8, 4, 2), bits(4, 2, 1)):
                place = arith.addi(place, part)
            memref.store(value, buffer, [token, place])

        tile.foreach(put)

    scatter(tile, buffer)


def _place(words: Any, i: int) -> Any:
    """Pair i of each int32: e2m1's sign, exponent and mantissa where both its bfloat16 have them.

    The pair is bits 4i .. 4i + 3 and those 16 above. A product by a sum of two powers copies them to
    both places at once, as nothing overlaps.
    """
    if i >= 2:
        words, i = words >> 8, i - 2
    alone = words & (0x000F000F << 4 * i)
    return (alone * ((1 << 6 - 4 * i) + (1 << 12 - 4 * i))) & np.int32(0x81C081C0 - 2**32)


def _unpack(words: jax.Array, codes: list[jax.Array], half: int) -> jax.Array:
    """uint8 [rows, STEP / 2] and GROUPS scales [rows]: bfloat16 [rows, STEP / 2], a half of the tile."""
    rows = words.shape[0]
    groups = GROUPS // 2

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT, *[_ROW] * groups),
        return_type=plgpu.ShapeDtypeStruct((rows, _HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def unpack(_, words, *codes):
        return _unpack_registers(words, codes, half)

    return unpack(words, *codes[half * groups : (half + 1) * groups])


def _unpack_registers(words: Any, codes: Any, half: int) -> Any:
    """`_unpack` of one thread's registers: 2 of 32 bits a group (rows 8 apart) become 8."""
    packed = words.registers.reshape(-1, 2)  # [groups of the tile, rows 8 apart]
    shape = (words.shape[0], _HALF)
    layout = mgpu.WGMMA_LAYOUT
    out = np.empty(layout.registers_shape(shape), dtype=object)
    flat = np.empty((len(codes), 4, 2), dtype=object)
    for group, code in enumerate(codes):
        for row, one in enumerate(code.registers.flat):
            flat[group, :, row] = pairs_of(packed[half * len(codes) + group, row], multiplier(one))
    out.flat = flat.flat
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def multiplier(code: Any) -> Any:
    """Both halves of 32 bits: the exponent of 2^(code - 1 - SHIFT), for a register with a scale's code."""
    from jax._src.lib.mlir.dialects import arith, llvm, vector

    # Written out, because LLVM would narrow the minimum to 16 bits and widen it again.
    text = f"{{ .reg .b32 t; min.u32 t, $1, {_MOST}; mad.lo.u32 $0, t, $2, $3; }}"
    operands = [
        arith.extui(i32(), vector.extract(code, [], [0])),
        _constant(0x00800080),
        _constant((126 - SHIFT) * 0x00800080),
    ]
    return llvm.inline_asm(i32(), operands, text, "=r,r,n,n")


def pairs_of(word: Any, factor: Any) -> list:
    """32 bits of a group, and its `multiplier`: pairs i = 0 .. 3 as registers of 2 bfloat16."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm

    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    word = mgpu.utils.bitcast(word, i32())
    high = arith.shrui(word, _constant(8))
    made = []
    for i in range(4):
        source, at = (word, i) if i < 2 else (high, i - 2)
        # As `_place`.
        alone = arith.andi(source, _constant(0x000F000F << 4 * at))
        spread = arith.muli(alone, _constant((1 << 6 - 4 * at) + (1 << 12 - 4 * at)))
        bits = arith.andi(spread, _constant(0x81C081C0 - 2**32))
        # This product keeps subnormal inputs and results, by its definition in PTX.
        one = llvm.inline_asm(i32(), [bits, factor], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")
        made.append(mgpu.utils.bitcast(one, pair))
    return made


def i32() -> Any:
    from jax._src.lib.mlir import ir

    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> Any:
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith

    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value))
