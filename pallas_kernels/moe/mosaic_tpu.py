"""Experts on a TPU: grouped products over a worklist, with weights unpacked on the chip.

A grid step multiplies the rows of one item with one tile of its expert's weight. The tiles of a
weight are the outer axis of the grid, so items of one expert, which are neighbours, share a tile
that is read once. Steps past the last item repeat the blocks of the last one, which copies nothing,
and compute nothing.

Every product has `TOKENS` rows and takes the columns of the weight in chunks of a fixed size, so a
row's result does not depend on the other rows, as far as the chip multiplies each row by itself.

- bfloat16: one product over all columns.
- fp8: widened to bfloat16, which is exact. Blocks of 128x128: a product for each, scaled in
  float32. One scale a row: the sum is scaled.
- mxfp4: bytes hold the elements of columns 2j and 2j + 1, so even and odd columns of x are separate
  operands. Elements times their scale are exact in bfloat16, but for scales of 2^-127, which become
  0. The axes of the weight are swapped: libtpu stores rows of 1,440 bytes (GPT-OSS), which are no
     multiple of
  128, by columns. The swap then moves nothing, and without it XLA would copy all experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats
from pallas_kernels.dispatch import Launch
from pallas_kernels.moe import reference
from pallas_kernels.moe.reference import Choice, Experts, ExpertWeights, Mixture, activate
from pallas_kernels.moe.worklist import Worklist, make_worklist

TOKENS = 32
"""Rows of an item."""
TILE = 256
"""Rows of a weight in a tile; a multiple of `formats.BLOCK`."""
_MOST_COLUMNS = 8192
"""Columns of a weight: a tile of them in bfloat16, twice, and as it is unpacked, must fit into
VMEM."""


def refusal(dtype: jnp.dtype, *weights: ExpertWeights) -> str | None:
    """Why the kernels do not support rows of `dtype` and these weights; None if they do."""
    if dtype != jnp.bfloat16:
        return f"activations must be bfloat16, not {dtype}"
    for weight in weights:
        values, scale = weight.values, weight.scale
        kind = formats.kind(values, scale)
        N, K = formats.logical_shape(values, scale)[-2:]
        if kind == "plain" and values.dtype != jnp.bfloat16:
            return f"plain weights must be bfloat16, not {values.dtype}"
        blocks = (-(-N // formats.BLOCK), -(-K // formats.BLOCK))
        if kind == "fp8" and scale.shape[-2:] not in (blocks, (N, 1)):
            return f"fp8 scales must be those of 128x128 blocks or rows, not {scale.shape}"
        if K > _MOST_COLUMNS:
            return f"weights may have at most {_MOST_COLUMNS} columns, not {K}"
    return None


def mixture(
    x: jax.Array,  # [R, D]
    logits: jax.Array,  # [R, E]
    choice: Choice,
    experts: Experts,
    launch: Launch,
) -> Mixture:
    """The mixture, with a part for each of a row's experts; XLA chooses them and sorts the rows."""
    weights, ids = reference.choose(logits, choice, experts)
    values, slots = results(x, ids, experts, launch)
    return Mixture(values, weights.T, slots)


def results(
    x: jax.Array, ids: jax.Array, experts: Experts, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    """Results of all items [items * TOKENS, D] in `x.dtype`, undefined where no slot points, and
    the slots [k, R] of rows x [R, D] with experts ids [R, k]."""
    R, E = len(x), len(experts.gate_up.values)
    shared = R <= TOKENS
    work = make_worklist(ids.T, E, TOKENS, shared)
    if shared:
        rows = jnp.pad(x, ((0, TOKENS - R), (0, 0)))
    else:
        source = jnp.zeros(work.items * TOKENS, jnp.int32)
        rows = x[source.at[work.slots].set(jnp.arange(R, dtype=jnp.int32))]
    run = functools.partial(_product, work=work, limit=experts.limit, launch=launch)
    inner = run(rows, experts.gate_up, shared=shared)
    with_part = lambda leaf: None if leaf is None else leaf[:, None]  # one part a weight
    down = ExpertWeights(*map(with_part, experts.down))
    return run(inner, down, shared=False), work.slots


def _product(
    x: jax.Array,  # [items * TOKENS, K], or [TOKENS, K] if shared
    weight: ExpertWeights,  # values [E, parts, N, K]: gate and up, or one
    *,
    work: Worklist,
    shared: bool,
    limit: float | None,
    launch: Launch,
) -> jax.Array:
    """bfloat16 [items * TOKENS, N]: the activation of gate and up, or the product of one part."""
    E, parts, N, width = weight.values.shape
    kind = formats.kind(weight.values, weight.scale)
    tiles = pl.cdiv(N, TILE)

    def last(i, num_items):
        """The item of a step; past the last one it stays there."""
        return jnp.minimum(i, num_items[0] - 1)

    def at(item):
        """An index map over (tile, item): the tile stays where the items end."""

        def index(n, i, experts, num_items):
            return item(n, last(i, num_items), experts)

        return index

    operands, specs = [], []

    def add(array, block, item, **space):
        operands.append(array)
        specs.append(pl.BlockSpec(block, at(item), **space))

    halves = (x[:, 0::2], x[:, 1::2]) if kind == "mxfp4" else (x,)
    for half in halves:
        add(half, (TOKENS, half.shape[1]), lambda n, i, experts: (0 if shared else i, 0))
    per_row = lambda n, i, experts: (experts[i], 0, 0, n)
    if kind == "mxfp4":
        for leaf in (weight.values, weight.scale):
            add(leaf.swapaxes(2, 3), (None, parts, leaf.shape[3], TILE), per_row)
    else:
        add(weight.values, (None, parts, TILE, width), lambda n, i, experts: (experts[i], 0, n, 0))
    if kind == "fp8" and weight.scale.shape[-2] == N:
        add(weight.scale.reshape(E, parts, 1, N), (None, parts, 1, TILE), per_row)
    elif kind == "fp8":
        whole = weight.scale.shape[1:]
        everything = lambda n, i, experts: (experts[i], 0, 0, 0)
        add(weight.scale, (None, *whole), everything, memory_space=pltpu.SMEM)
    if weight.bias is not None:
        add(weight.bias.reshape(E, parts, 1, N), (None, parts, 1, TILE), per_row)

    def kernel(experts_smem, num_items_smem, *refs):
        """Operands in the order in which they are added above, then the output."""
        del experts_smem
        n, i = pl.program_id(0), pl.program_id(1)

        @pl.when(i < num_items_smem[0])
        def _():
            *operands, out_vmem = refs
            x_vmem, other_refs = operands[: len(halves)], operands[len(halves) :]
            values_vmem, *other_refs = other_refs
            scale_ref = None if kind == "plain" else other_refs.pop(0)
            products = []
            for part in range(parts):
                y = _UNPACKED[kind](x_vmem, values_vmem.at[part], scale_ref, part, n)
                if other_refs:
                    y += other_refs[0][part].astype(jnp.float32)
                products.append(y)
            y = activate(*products, limit) if parts == 2 else products[0]
            out_vmem[...] = y.astype(out_vmem.dtype)

    # Tiles of weights, twice while the next ones are copied, and what they are unpacked to.
    vmem = parts * TILE * width * (32 if kind == "mxfp4" else 16) + 2**23
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiles, work.items),
            in_specs=specs,
            out_specs=pl.BlockSpec((TOKENS, TILE), at(lambda n, i, experts: (i, n))),
        ),
        out_shape=jax.ShapeDtypeStruct((work.items * TOKENS, N), x.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=min(vmem, 2**26)),
        name=f"moe_{'gate_up' if parts == 2 else 'down'}_{kind}",
        interpret=launch.interpret or False,
    )(work.experts, work.num_items, *operands)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K]: float32 [M, N]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _plain(x_vmem, values_vmem, scale_ref, part, n) -> jax.Array:
    return _dot(x_vmem[0][...], values_vmem[...])


def _fp8(x_vmem, values_vmem, scale_ref, part, n) -> jax.Array:
    x = x_vmem[0][...]
    values = values_vmem[...].astype(jnp.bfloat16)
    if scale_ref.shape[-2:] == (1, TILE):  # one scale a row
        return _dot(x, values) * scale_ref[part]
    most, columns = scale_ref.shape[-2:]
    blocks = []
    for block in range(TILE // formats.BLOCK):
        row = jnp.minimum(n * (TILE // formats.BLOCK) + block, most - 1)  # a tile may be ragged
        rows = values[block * formats.BLOCK : (block + 1) * formats.BLOCK]
        total = jnp.zeros((TOKENS, formats.BLOCK), jnp.float32)
        for column in range(columns):
            at = slice(column * formats.BLOCK, (column + 1) * formats.BLOCK)
            total += _dot(x[:, at], rows[:, at]) * scale_ref[part, row, column]
        blocks.append(total)
    return jnp.concatenate(blocks, axis=1)


def _mxfp4(x_vmem, values_vmem, scale_ref, part, n) -> jax.Array:
    codes = values_vmem[...].astype(jnp.int32)  # [K / 2, TILE]
    exponents = scale_ref[part].astype(jnp.int32)  # [K / 32, TILE]
    bits = jnp.where(exponents == 255, 0x7FC00000, exponents << 23)  # 255 is NaN
    factors = lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
    # Each factor belongs to 16 bytes. A product with a matrix of zeros and ones repeats it exactly.
    shape = (codes.shape[0], factors.shape[0])
    column = lax.broadcasted_iota(jnp.int32, shape, 0)
    group = lax.broadcasted_iota(jnp.int32, shape, 1)
    owns = (group == column // (formats.GROUP // 2)).astype(jnp.bfloat16)
    factors = jnp.dot(owns, factors, preferred_element_type=jnp.float32)
    unpack = lambda code: (_e2m1(code) * factors).astype(jnp.bfloat16)
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    even_vmem, odd_vmem = x_vmem
    return dot(even_vmem[...], unpack(codes & 15)) + dot(odd_vmem[...], unpack(codes >> 4))


def _e2m1(code: jax.Array) -> jax.Array:
    """float32 values of 4-bit codes; an index of 2 or more is two exponent bits and one mantissa
    bit."""
    index = code & 7
    top = jnp.where(index == 0, 0, 252 + index - (index == 1))
    return lax.bitcast_convert_type((top << 22) | ((code & 8) << 28), jnp.float32)


_UNPACKED = {"plain": _plain, "fp8": _fp8, "mxfp4": _mxfp4}
"""Products of the rows of an item with a tile, by format: float32 [TOKENS, TILE]."""
