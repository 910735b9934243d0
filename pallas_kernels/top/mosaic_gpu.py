"""Kernels of the 16 largest values of rows, for Hopper and Blackwell.

`_reduce` divides tiles of a row into segments and keeps 16 values of each; `_merge` takes rows as
segments. A short row is reduced as it is.

The 16 largest values of a row lie in its 16 best tiles: those with the largest maxima, the first
ones of equal maxima. So a long row is read once, by `_maxima`, without rounds. `_choose` finds the
tiles in 16 rounds over one number of each, and `_reduce` takes only these.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.top.mosaic_segments import (
    COUNT,
    LOWEST,
    SEGMENTS,
    extract,
    iota,
    launch_kernel,
    load,
    load_values,
)

_CHUNK = 64
"""Columns that divide a row."""
_TILE = 4
"""Chunks of a tile: one register array [4, 64] of `_reduce`, each chunk in another segment."""
_TILES = 8
"""Tiles of a block of `_reduce`: 16 values per thread."""
_READ = 16
"""Chunks of a read: one register array [16, 64] of `_maxima`, four tiles."""
_READS = 4
"""Reads of a block of `_maxima`: 16 KB, all under way at once."""
_CHOICE = 32
"""Tiles of one register array of `_choose`."""
_SHORT = 16_384
"""Most columns of a row that is reduced as it is. It takes two kernels where a long row takes four,
and 16 rounds over all values. At this width the rounds take as long as the two launches with 224
rows, and less with 7: predicted from instructions; this limit was not measured."""
_READ_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 32), (4, 16), (4, 8), (4, 4))), (-8,), (-2, -7, -5, -3), -1
)
"""Eight threads of a warp share a chunk, so its maximum takes three shuffles; each loads four
columns at once."""


@functools.partial(jax.jit, static_argnames="launch")
def top(values: jax.Array, *, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """Indices int32 and values float32, both [R, 16], of the largest of values [R, V] float32."""
    R, V = values.shape
    tiles = _choose(_maxima(values, launch), launch) if V > _SHORT else None
    values, ids = _merge(*_reduce(values, tiles, launch), launch)
    return ids[:R], values[:R]


def _maxima(values, launch: Launch) -> jax.Array:
    """The maximum of each chunk of a tile: values [R, V] -> [R', tiles, 4].

    R' is a multiple of 4, and rows past R stay undefined. `tiles` is a multiple of 32, and the
    maximum of a chunk that does not exist or does not count is the lowest finite number.
    """
    R, V = values.shape
    chunks = V // _CHUNK
    blocks = 2 * pl.cdiv(chunks, 2 * _READS * _READ)

    def body(values_gmem, maxima_gmem):
        r, block = lax.axis_index("row"), lax.axis_index("block")
        reads = [_read(block * _READS + i, chunks) for i in range(_READS)]
        sources = [values_gmem.at[r, pl.ds(begin, _READ)] for begin, _ in reads]
        loaded = [load_values(source, _READ_LAYOUT) for source in sources]
        chunk = plgpu.broadcasted_iota(jnp.int32, (_READ,), 0, layout=_READ_LAYOUT.reduce(1))
        for i, (x, (begin, first)) in enumerate(zip(loaded, reads, strict=True)):
            maxima = jnp.max(x, axis=1)
            maxima_gmem[r, block, i] = jnp.where(begin + chunk >= first, maxima, LOWEST)

    shape = _padded(R), blocks, _READS, _READ
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = launch_kernel(body, out, (R, blocks), ("row", "block"), launch, "top_maxima")
    return kernel(values.reshape(R, chunks, _CHUNK)).reshape(shape[0], -1, _TILE)


def _read(number, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Scalars (begin, first) of a read of a row: its first chunk, and the first one that counts.

    The last read ends with the row. What it shares with the read before does not count, so tiles
    share nothing and lie in the order of their numbers. Of a read that does not exist nothing
    counts.
    """
    first = number * _READ
    return lax.min(first, chunks - _READ), first


def _choose(maxima, launch: Launch) -> jax.Array:
    """The best tiles of rows: maxima [R, tiles, 4] -> int32 [R, 16]."""
    R, tiles, _ = maxima.shape

    def body(maxima_gmem, tiles_gmem):
        rows = pl.ds(lax.axis_index("block") * SEGMENTS, SEGMENTS)
        starts = [*range(0, tiles, _CHOICE)]
        loaded = [
            [load(maxima_gmem.at[rows, pl.ds(start, _CHOICE), chunk]) for chunk in range(_TILE)]
            for start in starts
        ]

        def store(i, _, tile):
            tiles_gmem[rows, i] = tile

        of_tiles = [functools.reduce(jnp.maximum, chunks) for chunks in loaded]
        extract(of_tiles, iota(1, _CHOICE), starts, store)

    out = jax.ShapeDtypeStruct((R, COUNT), jnp.int32)
    grid = (R // SEGMENTS,)
    return launch_kernel(body, out, grid, ("block",), launch, "top_choose")(maxima)


def _reduce(values, tiles, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """The 16 largest of each segment of a row.

    Args:
      values: [R, V].
      tiles: the tiles to take, int32 [R', 16], in any order; None: all.
    Returns:
      (values, ids), both [R'', n]: R'' is a multiple of 4, and rows past R stay undefined.
    """
    R, V = values.shape
    chunks = V // _CHUNK
    per_read = _READ // _TILE
    count = pl.cdiv(chunks, _READ) * per_read if tiles is None else COUNT
    blocks = pl.cdiv(count, _TILES)

    def body(*refs):
        # In [R, chunks, 64] and out [R'', blocks, 16, 4], the i-th largest of segment s at [i, s].
        values_gmem, *tiles_gmem, values_out, ids_out = refs
        r, block = lax.axis_index("row"), lax.axis_index("block")
        column = iota(0, _CHUNK) * _CHUNK + iota(1, _CHUNK)
        loaded, starts = [], []
        for tile in [block * _TILES + i for i in range(_TILES)]:
            tile = tiles_gmem[0][r, tile] if tiles_gmem else tile
            begin, first = _read(lax.div(tile, per_read), chunks)
            start = begin + lax.rem(tile, per_read) * _TILE
            x = load_values(values_gmem.at[r, pl.ds(start, _TILE)])
            loaded.append(jnp.where(column >= (first - start) * _CHUNK, x, LOWEST))
            starts.append(start * _CHUNK)

        def store(i, best, place):
            values_out[r, block, i] = best
            ids_out[r, block, i] = place

        extract(loaded, column, starts, store)

    shape = _padded(R), blocks, COUNT, SEGMENTS
    operands = [x for x in (values.reshape(R, chunks, _CHUNK), tiles) if x is not None]
    kernel = launch_kernel(body, _pair(shape), (R, blocks), ("row", "block"), launch, "top_reduce")
    return tuple(x.reshape(shape[0], -1) for x in kernel(*operands))


def _merge(values, ids, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """The 16 largest of rows: values and ids [R, n], R a multiple of 4 -> both [R, 16]."""
    R, _ = values.shape

    def body(values_gmem, ids_gmem, values_out, ids_out):
        rows = pl.ds(lax.axis_index("block") * SEGMENTS, SEGMENTS)

        def store(i, best, place):
            values_out[rows, i] = jnp.where(best == LOWEST, -jnp.inf, best)
            ids_out[rows, i] = place

        extract([load_values(values_gmem.at[rows])], 0, [load(ids_gmem.at[rows])], store)

    out, grid = _pair((R, COUNT)), (R // SEGMENTS,)
    return launch_kernel(body, out, grid, ("block",), launch, "top_merge")(values, ids)


def _padded(rows: int) -> int:
    return pl.cdiv(rows, SEGMENTS) * SEGMENTS


def _pair(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
