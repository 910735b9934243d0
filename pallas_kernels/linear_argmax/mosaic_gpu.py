"""Kernels of the largest output of a linear layer: an epilogue of `block_gemm`, and a merge of its tiles.

A block of the product has sums of 64 rows of the weight (128 on Blackwell in data centres) and up to 128 tokens.
`Largest` reduces them to two numbers for each token: the largest sum, and a rank that orders equal ones.

    product    sums [rows, tokens] -> shared memory [tokens, rows] -> values, ranks [tiles, tokens] in memory
    merge      values, ranks [tiles, tokens] -> index, maximum [tokens]

The rank of index i is `_FIRST - i`, so of equal values the largest rank has the lowest index. The largest of values
with a NaN is NaN, and the merge takes it as +inf with `_FIRST + 1` added to its rank, so that it comes before +inf
and an earlier NaN before a later one. Maxima do not depend on the order in which tiles and threads are merged.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_gemm.mosaic_gpu import TuningConfig
from pallas_kernels.dispatch import Launch
from pallas_kernels.weight_tiles.format import Format

_FIRST = 2**30 - 1
"""Rank of index 0."""
_NONE = -1
"""Rank of what does not exist."""
_TOKENS = {
    16: plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4, 4))), (-6,), (-2, -3), -1),
    8: plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (2, 4))), (-6,), (-2, -3), -1),
}
"""Registers of sums [tokens, rows] of multiples of so many tokens: 8 or 16 threads of a warp share a token, and each
holds groups of four rows. 8 threads read 128 bytes, without bank conflicts, and reduce them in three shuffles."""
_TILES = plgpu.Layout.TILED(plgpu.Tiling(((64, 8), (16, 8), (16, 4))), (-6,), (-2, -3), -1)
"""Registers of values or ranks [tiles, tokens]: each thread has four tokens of a tile."""
_CHUNK = 64
"""Tiles of one register array of the merge."""
_COLUMNS = 8
"""Tokens of a block of the merge."""
_CHUNKS = 8
"""Most register arrays of the merge that are loaded before the first one is used."""


@dataclass(frozen=True)
class Largest:
    """`Epilogue` that stores the largest sum of each tile and token, and its rank."""

    name: str = "block_gemm_argmax"

    def results(
        self, form: Format, config: TuningConfig, R: int, N: int
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Values float32 and ranks int32, both [tiles, tokens], padded to whole loads of the merge."""
        tiles = pl.cdiv(N, form.rows)
        shape = _whole(tiles, _loaded(tiles) * _CHUNK), _whole(R, config.tokens)
        return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)

    def store(
        self,
        form: Format,
        results_gmem: Sequence[Any],
        out_smem: Any,
        totals_reg: Sequence[jax.Array],
        first_token: Any,
        first_row: Any,
        N: int,
    ) -> None:
        """Stores the largest of a tile, n tokens at a time; rows from N on do not count."""
        values_gmem, ranks_gmem = results_gmem
        size, rows = out_smem.shape
        layout = _TOKENS[8 if size % 16 else 16]
        tile = lax.div(first_row, rows)
        row = plgpu.broadcasted_iota(jnp.int32, (size, rows), 1, layout=layout) + first_row
        starts = [(total, at) for total in totals_reg for at in range(0, total.shape[1], size)]
        for i, (total, at) in enumerate(starts):
            part_reg = total if total.shape[1] == size else total[:, at : at + size]
            out_smem.T[...] = plgpu.layout_cast(part_reg, form.mma.transposed)
            plgpu.commit_smem()  # also a barrier: other threads read what this one wrote
            value, rank = plgpu.load(out_smem, layout=layout, optimized=False), _FIRST - row
            if N % rows:
                value, rank = jnp.where(row < N, value, -jnp.inf), jnp.where(row < N, rank, _NONE)
            best, best_rank = _first_largest(value, rank, axis=1)
            columns = pl.ds(first_token + i * size, size)
            values_gmem[tile, columns] = best
            ranks_gmem[tile, columns] = best_rank
            if i + 1 < len(starts):
                plgpu.commit_smem()  # the next part overwrites the sums


@functools.partial(jax.jit, static_argnames=("tiles", "launch"))
def merge(
    values: jax.Array, ranks: jax.Array, *, tiles: int, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    """Index int32 and maximum float32, both [R], from `Largest` of `tiles` tiles; R a multiple of 8."""
    R, count = values.shape[1], _loaded(tiles)

    def body(values_gmem, ranks_gmem, index_gmem, maximum_gmem):
        columns = pl.ds(lax.axis_index("block") * _COLUMNS, _COLUMNS)
        place = plgpu.broadcasted_iota(jnp.int32, (_CHUNK, _COLUMNS), 0, layout=_TILES)
        load = lambda ref, first: plgpu.load(
            ref.at[pl.ds(first, _CHUNK), columns], layout=_TILES, optimized=False
        )

        def add(step, carry):
            firsts = [(step * count + i) * _CHUNK for i in range(count)]
            loaded = [(load(values_gmem, at), load(ranks_gmem, at)) for at in firsts]
            for first, (value, rank) in zip(firsts, loaded, strict=True):
                rank = jnp.where(value == value, rank, rank + _FIRST + 1)
                value = jnp.where(value == value, value, jnp.inf)
                exists = first + place < tiles  # memory past the tiles is not written
                value, rank = jnp.where(exists, value, -jnp.inf), jnp.where(exists, rank, _NONE)
                best, best_rank = carry
                of_equal = jnp.where(value == best, jnp.maximum(rank, best_rank), best_rank)
                carry = jnp.maximum(best, value), jnp.where(value > best, rank, of_equal)
            return carry

        shape = _CHUNK, _COLUMNS
        full = lambda value, dtype: plgpu.layout_cast(jnp.full(shape, value, dtype), _TILES)
        start = full(-jnp.inf, jnp.float32), full(_NONE, jnp.int32)
        steps = pl.cdiv(tiles, count * _CHUNK)
        best, rank = _first_largest(*lax.fori_loop(0, steps, add, start), axis=0)
        is_number = rank <= _FIRST
        index_gmem[columns] = jnp.where(is_number, _FIRST - rank, 2 * _FIRST + 1 - rank)
        maximum_gmem[columns] = jnp.where(is_number, best, jnp.nan)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((R,), jnp.int32),
            jax.ShapeDtypeStruct((R,), jnp.float32),
        ),
        grid=(R // _COLUMNS,),
        grid_names=("block",),
        interpret=launch.interpret,
        kernel_name="argmax_merge",
    )(values, ranks)


def tiles(N: int, launch: Launch) -> int:
    """Tiles of a weight of N rows."""
    return pl.cdiv(N, Format.of_kind("plain", launch.device).rows)


def _first_largest(value: jax.Array, rank: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The largest value along an axis, NaN if there is one, and the largest rank of those that equal it."""
    best = jnp.max(value, axis=axis)
    wide = lax.broadcast_in_dim(best, value.shape, (1 - axis,))
    is_best = (value == wide) | (value != value)
    return best, jnp.max(jnp.where(is_best, rank, _NONE), axis=axis)


def _loaded(tiles: int) -> int:
    """Register arrays of the merge that are loaded before the first one is used."""
    return min(_CHUNKS, pl.cdiv(tiles, _CHUNK))


def _whole(n: int, unit: int) -> int:
    return pl.cdiv(n, unit) * unit
