"""Kernels of the 16 largest values of rows, for Hopper and Blackwell.

A warpgroup holds an array of 16 segments in registers. Eight threads share a segment, so its maximum takes
three shuffles and no barrier. The largest value of each segment is taken 16 times. `_reduce` divides long
rows into segments and keeps 16 values of each; `_merge` takes rows as segments. A row of 8,192 values is a
block of `_reduce`, which leaves 256, and a segment of `_merge`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

_COUNT = 16
_SEGMENTS = 16
_TILE = 64
"""Columns of one register array [16, 64]."""
_PARTS = 8
"""Register arrays of a block of `_reduce`: 64 values per thread."""
_MOST = 512
"""Most values of a row in `_merge`."""
_LOWEST = float(jnp.finfo(jnp.float32).min)
_LAST = 2**31 - 1
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 32), (4, 16), (4, 8), (4, 4))), (-8,), (-2, -7, -5, -3), -1
)
"""Eight threads of a warp share a row of [16, 64]; each holds groups of four columns."""


@functools.partial(jax.jit, static_argnames="launch")
def top(values: jax.Array, *, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """Indices int32 and values float32, both [R, 16], of the largest of values [R, V] float32."""
    R, ids = values.shape[0], None
    while ids is None or values.shape[1] > _MOST:
        values, ids = _reduce(values, ids, launch)
    values, ids = _merge(values, ids, launch)
    return ids[:R], values[:R]


def _reduce(values, ids, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """The 16 largest of each segment: values [R', n] and ids -> both [R'', m], R'' a multiple of 16.

    Rows past R' stay undefined. Without ids they are the columns. Row s of part p of a block is tile
    `block * 128 + 16 p + s` of the row, and a segment is row s of all parts.
    """
    R, n = values.shape
    tiles = n // _TILE
    parts = min(_PARTS, pl.cdiv(tiles, _SEGMENTS))
    blocks = pl.cdiv(tiles, parts * _SEGMENTS)
    is_ragged = tiles % (parts * _SEGMENTS) > 0

    def body(*refs):
        # In [R, tiles, 64] and out [R'', blocks, 16, 16], the i-th largest of segment s at [i, s].
        values_gmem, *ids_gmem, values_out, ids_out = refs
        r, block = lax.axis_index("row"), lax.axis_index("block")
        firsts = [(block * parts + p) * _SEGMENTS for p in range(parts)]
        begins = [lax.min(first, tiles - _SEGMENTS) for first in firsts]
        sources = [pl.ds(begin, _SEGMENTS) for begin in begins]
        loaded = [_load_values(values_gmem.at[r, source]) for source in sources]
        if is_ragged:  # leave out tiles that an earlier part has
            loaded = [
                jnp.where(begin + _iota(0) >= first, x, -jnp.inf)
                for x, begin, first in zip(loaded, begins, firsts, strict=True)
            ]
        if ids_gmem:
            places = [_load(ids_gmem[0].at[r, source]) for source in sources]
            place_of = places.__getitem__
        else:  # counted where they are used: places of all parts would take a register each
            column = _iota(0) * _TILE + _iota(1)
            place_of = lambda p: column + begins[p] * _TILE

        def store(i, best, place):
            values_out[r, block, i] = best
            ids_out[r, block, i] = place

        _extract(loaded, place_of, store)

    shape = pl.cdiv(R, _SEGMENTS) * _SEGMENTS, blocks, _COUNT, _SEGMENTS
    in_tiles = lambda x: x.reshape(R, tiles, _TILE)
    operands = [in_tiles(x) for x in (values, ids) if x is not None]
    outs = _launch(body, shape, (R, blocks), ("row", "block"), launch, "top_reduce")(*operands)
    return tuple(x.reshape(shape[0], -1) for x in outs)


def _merge(values, ids, launch: Launch) -> tuple[jax.Array, jax.Array]:
    """The 16 largest of rows: values and ids [R, n], R a multiple of 16 -> both [R, 16]."""
    R, n = values.shape

    def body(values_gmem, ids_gmem, values_out, ids_out):
        rows = pl.ds(lax.axis_index("block") * _SEGMENTS, _SEGMENTS)
        columns = [pl.ds(start, _TILE) for start in range(0, n, _TILE)]
        loaded = [_load_values(values_gmem.at[rows, part]) for part in columns]
        places = [_load(ids_gmem.at[rows, part]) for part in columns]

        def store(i, best, place):
            values_out[rows, i] = jnp.where(best == _LOWEST, -jnp.inf, best)
            ids_out[rows, i] = place

        _extract(loaded, places.__getitem__, store)

    grid = (R // _SEGMENTS,)
    return _launch(body, (R, _COUNT), grid, ("block",), launch, "top_merge")(values, ids)


def _extract(values: list, place_of: Callable, store: Callable) -> None:
    """Calls `store(i, value, place)` with the i-th largest of each segment, both [16], for i below 16.

    Args:
      values: float32 [16, 64] each, finite, or -inf for values that do not exist.
      place_of: function from the number of a part to its places, int32 [16, 64], from 0.
    """

    def take(i, values):
        best = _largest(values)
        wide = _broadcast(best)
        # Places from the end: the largest of equal values' is the lowest place.
        ties = [jnp.where(x == wide, _LAST - place_of(p), 0) for p, x in enumerate(values)]
        place = _LAST - _largest(ties)
        store(i, best, place)
        taken = _broadcast(place)
        return [jnp.where(place_of(p) == taken, -jnp.inf, x) for p, x in enumerate(values)]

    lax.fori_loop(0, _COUNT, take, values)


def _largest(parts: list) -> jax.Array:
    """[16], the largest of each segment."""
    return jnp.max(functools.reduce(jnp.maximum, parts), axis=1)


def _iota(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (_SEGMENTS, _TILE), axis, layout=_LAYOUT)


def _broadcast(column: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(column, (_SEGMENTS, _TILE), (0,))


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _load_values(ref) -> jax.Array:
    """NaN and -inf become the lowest finite number: -inf marks what is taken already."""
    x = _load(ref)
    return jnp.where(x == x, jnp.maximum(x, _LOWEST), _LOWEST)


def _launch(body, shape: tuple[int, ...], grid, names, launch: Launch, name: str):
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        # Safe: no thread reads what another has written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=grid,
        grid_names=names,
        interpret=launch.interpret,
        kernel_name=name,
    )
