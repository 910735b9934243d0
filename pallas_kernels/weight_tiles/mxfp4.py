"""MXFP4 weight tiles: unpacks 4-bit values to bfloat16 in registers.

A Hopper thread loads one 32-bit word of a row, 8 neighbouring e2m1 values. Four threads j = 0 .. 3
cover a group of 32 columns, which shares one e8m0 scale:

    word of thread j     bits 31 .. 28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
    column in the group       8j + 7    8j + 6  8j + 5  8j + 4  8j + 3  8j + 2  8j + 1  8j

    pair i = 0 .. 3      nibble i (half h = 0) and nibble i + 4 (half h = 1): 16 bits apart
    nibble               s e1 e0 m                            sign, exponent, mantissa
    bfloat16 of a half   s 0 0 0 0 0 0 e1 e0 m 0 0 0 0 0 0    value * 2^-126

So a mask, a multiply and a mask unpack two values. wgmma assigns other columns to a thread. No
shuffle is needed, because a sum over K may run in any order: `arrange` permutes the activations
instead. In each group of 32, position 8i + 2j + h holds column 8j + 4h + i. A Blackwell thread
loads whole rows (all four words) and uses the same order.

Scales: a product with 2^(126 - SHIFT) times the group's scale gives the weight times 2^-SHIFT,
subnormal values included. The float32 sums are multiplied by 2^SHIFT. This is exact for scale codes
59 to 192 (2^-68 to 2^65). Weights with lower codes are rounded to multiples of 2^-69. Codes above
192, and 255 (NaN), are treated as 192.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels import mlir_compat as mlir

STEP = 256
"""K columns of one tile: 128 bytes a row."""
GROUPS = STEP // formats.GROUP
"""Scale groups in one row of a tile."""
SHIFT = 64
RESCALE = 2.0**SHIFT
"""Factor on sums of products with unpacked weights."""

_HALF = STEP // 2  # columns unpacked at once; limits register pressure
_MAX_CODE = 254 - 126 + SHIFT  # scale code whose multiplier has the largest exponent
_ROW = plgpu.Layout.WGMMA.reduce(1)  # register layout of one element per row on Hopper


def arrange(x: jax.Array) -> jax.Array:
    """Permutes the columns of x [..., K] to the order of unpacked weights; K is a multiple of
    32."""
    pairs = x.reshape(*x.shape[:-1], -1, 4, 2, 4)  # [.., K / 32, j, h, i]
    return jnp.moveaxis(pairs, -1, -3).reshape(x.shape)


def load_scales(
    scales_smem: Any, rows: int, step: Any, interpret: Any, layout: Any = _ROW
) -> list[jax.Array]:
    """Loads the scales of one tile: GROUPS arrays uint8 [rows] in registers.

    Groups past K repeat the last group. Their weights are zeros, so any finite scale is correct.

    Args:
      scales_smem: uint8 [rows * K / 32].
      step: number of the tile along K.
      layout: register layout of one element per row.
    """
    shape = (rows, scales_smem.shape[0] // rows)
    last = shape[1] - 1
    columns = [jnp.minimum(step * GROUPS + group, last) for group in range(GROUPS)]
    if interpret is not None:
        matrix = scales_smem[...].reshape(shape)
        return [lax.dynamic_index_in_dim(matrix, column, 1, keepdims=False) for column in columns]

    # Inline MLIR: layout inference rejects a column, which is not contiguous.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * GROUPS),
        return_type=[plgpu.ShapeDtypeStruct((rows,), jnp.uint8, layout=layout)] * GROUPS,
    )
    def load(_, scales, *columns):
        scales = mlir.memref_reshape(scales, shape)

        def load_column(column):
            column = mlir.arith.index_cast(mlir.ir.IndexType.get(), column.registers.item())
            return mlir.FragmentedArray.load_untiled(
                mlir.memref_slice(scales, (slice(None), column)),
                layout=layout.to_mgpu(),
                is_signed=False,
                optimized=False,
            )

        return [load_column(column) for column in columns]

    return load(scales_smem, *columns)


def interpreted(tile: jax.Array, scales: list[jax.Array]) -> jax.Array:
    """Interpreter version of the unpacking: float32 [rows, STEP], by the same bit operations."""
    words = lax.bitcast_convert_type(tile.reshape(tile.shape[0], -1, 4), jnp.int32)
    pairs = []
    for group, codes in enumerate(scales):
        code = jnp.minimum(codes.astype(jnp.int32), _MAX_CODE)[:, None]
        factor = lax.bitcast_convert_type((code + 126 - SHIFT) << 23, jnp.float32) * 2.0**-126
        group_words = words[:, 4 * group : 4 * group + 4]
        for i in range(4):
            bits = _expand_pair(group_words, i)
            for half in (bits << 16, bits & np.int32(-0x10000)):
                size = half & np.int32(2**31 - 1)
                normal = lax.bitcast_convert_type(size + (126 << 23), jnp.float32)
                value = jnp.where(size < 1 << 23, size.astype(jnp.float32) * 2.0**-23, normal)
                pairs.append(jnp.where(half < 0, -value, value) * factor)
    # [rows, group, i, h, j] -> [rows, group, i, j, h]
    weights = jnp.stack(pairs, 1).reshape(-1, GROUPS, 4, 2, 4)
    return jnp.swapaxes(weights, -1, -2).reshape(-1, STEP)


def store_arranged(out_smem: Any, tile: jax.Array, layout: plgpu.Layout, interpret: Any) -> None:
    """Stores tile [rows, tokens] to out_smem [tokens, rows], with the rows in `arrange` order."""
    tile = tile.astype(out_smem.dtype)
    if interpret is not None:
        out_smem[...] = arrange(tile.T)
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def scatter(_, tile, buffer):
        def put(value, at):
            row, token = at
            index = lambda n: mlir.constant(n, row.type)
            bits = lambda low, size, to: mlir.arith.muli(
                mlir.arith.remui(mlir.arith.divui(row, index(low)), index(size)), index(to)
            )
            # Row 32b + 8j + 4h + i goes to position 32b + 8i + 2j + h.
            place = mlir.arith.muli(mlir.arith.divui(row, index(32)), index(32))
            for part in (bits(1, 4, 8), bits(8, 4, 2), bits(4, 2, 1)):
                place = mlir.arith.addi(place, part)
            mlir.memref.store(value, buffer, [token, place])

        tile.foreach(put)

    scatter(tile, out_smem)


def _expand_pair(words: Any, i: int) -> Any:
    """Moves the bits of pair i of each int32 to their bfloat16 positions, in both halves.

    One multiply by a sum of two powers of two shifts the sign and the other bits by different
    amounts. The shifted copies do not overlap.
    """
    if i >= 2:
        words, i = words >> 8, i - 2
    pair = words & (0x000F000F << 4 * i)
    return (pair * ((1 << 6 - 4 * i) + (1 << 12 - 4 * i))) & np.int32(0x81C081C0 - 2**32)


def unpack_half(words_reg: jax.Array, codes_reg: list[jax.Array], half: int) -> jax.Array:
    """One half of a Hopper tile: uint8 [rows, STEP / 2], scales [rows] -> bfloat16
    [rows, STEP / 2]."""
    groups = GROUPS // 2

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT, *[_ROW] * groups),
        return_type=plgpu.ShapeDtypeStruct(
            (words_reg.shape[0], _HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def unpack(_, words, *codes):
        return _unpack_registers(words, codes, half)

    return unpack(words_reg, *codes_reg[half * groups : (half + 1) * groups])


def _unpack_registers(words: Any, codes: Any, half: int) -> Any:
    """`unpack_half` for one thread: 2 words per group (rows 8 apart) become 8 registers of 2
    bfloat16."""
    packed = words.registers.reshape(-1, 2)  # [groups of the tile, rows 8 apart]
    shape = (words.shape[0], _HALF)
    layout = mlir.WGMMA_LAYOUT
    out = np.empty(layout.registers_shape(shape), dtype=object)
    flat = np.empty((len(codes), 4, 2), dtype=object)
    for group, code in enumerate(codes):
        for row, scale in enumerate(code.registers.flat):
            word = packed[half * len(codes) + group, row]
            flat[group, :, row] = unpack_pairs(word, multiplier(scale))
    out.flat = flat.flat
    return mlir.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def multiplier(code: Any) -> Any:
    """2^(code - 1 - SHIFT) as bfloat16 in both halves of a 32-bit register, from a scale code."""

    # Inline PTX: LLVM narrows the minimum to 16 bits and widens it again.
    text = f"{{ .reg .b32 t; min.u32 t, $1, {_MAX_CODE}; mad.lo.u32 $0, t, $2, $3; }}"
    operands = [
        mlir.arith.extui(mlir.i32(), mlir.vector.extract(code, [], [0])),
        _constant(0x00800080),
        _constant((126 - SHIFT) * 0x00800080),
    ]
    return mlir.llvm.inline_asm(mlir.i32(), operands, text, "=r,r,n,n")


def unpack_pairs(word: Any, factor: Any) -> list:
    """Unpacks one word and scales it by `multiplier`: pairs i = 0 .. 3, registers of 2 bfloat16."""

    pair = mlir.ir.VectorType.get((2,), mlir.ir.BF16Type.get())
    word = mlir.bitcast(word, mlir.i32())
    high = mlir.arith.shrui(word, _constant(8))
    pairs = []
    for i in range(4):
        source, at = (word, i) if i < 2 else (high, i - 2)
        # As `_expand_pair`.
        nibbles = mlir.arith.andi(source, _constant(0x000F000F << 4 * at))
        spread = mlir.arith.muli(nibbles, _constant((1 << 6 - 4 * at) + (1 << 12 - 4 * at)))
        bits = mlir.arith.andi(spread, _constant(0x81C081C0 - 2**32))
        # PTX defines mul.bf16x2 with subnormal inputs and results.
        product = mlir.llvm.inline_asm(
            mlir.i32(), [bits, factor], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r"
        )
        pairs.append(mlir.bitcast(product, pair))
    return pairs


def _constant(value: int) -> Any:
    return mlir.constant(value, mlir.i32())
