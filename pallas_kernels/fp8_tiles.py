"""FP8 weights in the order in which Hopper's threads multiply them.

A weight [N, K] is divided into tiles of 64 rows and 128 columns. A tile is 8 KB without gaps: one
bulk copy, and each thread of a warpgroup then loads its 64 numbers 16 bytes at a time, already in
the order of the registers of wgmma's first operand. In the plain order threads load 4 bytes at a
time, and then exchange half of them.

    number of a tile      row                   column
    w h g, c q t j        16 w + 8 h + g        32 c + 8 q + 2 t + j

Here w is the warp, 8 x 4 lanes are (g, t), and a thread holds the numbers of all c, q, h and j, in
this order. A tile stores [c, w, g, t, q, h, j]. The order inside a tile changes no sum.
"""

from collections.abc import Sequence

import jax
import numpy as np

ROWS, COLUMNS = 64, 128
"""Rows and columns of a tile."""
SIZE = ROWS * COLUMNS
"""Numbers, and bytes, of a tile."""
LOAD = 16
"""Bytes that a thread loads at once."""

LOADS = SIZE // LOAD, LOAD
"""A tile as loads: load number, and byte of it."""

_ROW, _COLUMN = (4, 2, 8), (4, 4, 4, 2)  # w h g, c q t j
_STORED = (0, 4, 5, 1, 3, 7, 6, 2, 8)
"""Axes [row tile, w, h, g, column tile, c, q, t, j] in the order [row tile, column tile, c, w, g,
t, q, h, j]."""


def fits(N: int, K: int) -> bool:
    """Whether a weight [N, K] consists of whole tiles."""
    return N % ROWS == 0 and K % COLUMNS == 0


def arrange(values: jax.Array) -> jax.Array:
    """A weight [..., N, K] in tiles: [..., N / 64, K / 128, 8192].

    Raises:
      ValueError: it does not consist of whole tiles.
    """
    *leading, N, K = values.shape
    if not fits(N, K):
        raise ValueError(f"tiles have {ROWS} rows and {COLUMNS} columns: {values.shape=}")
    parts = values.reshape(_split(values.shape))
    return parts.transpose(_order(leading)).reshape(tiled_shape(values.shape))


def restore(tiles: jax.Array) -> jax.Array:
    """`arrange` undone: [..., N / 64, K / 128, 8192] -> [..., N, K]."""
    shape = logical_shape(tiles.shape)
    split, order = _split(shape), _order(shape[:-2])
    parts = tiles.reshape([split[axis] for axis in order])
    return parts.transpose(np.argsort(order)).reshape(shape)


def _split(shape: Sequence[int]) -> tuple[int, ...]:
    """[..., N, K] as [..., row tile, w, h, g, column tile, c, q, t, j]."""
    *leading, N, K = shape
    return (*leading, N // ROWS, *_ROW, K // COLUMNS, *_COLUMN)


def _order(leading: Sequence[int]) -> tuple[int, ...]:
    """Axes of `_split` in the order in which tiles store them."""
    n = len(leading)
    return (*range(n), *(n + axis for axis in _STORED))


def tiled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tiles of a weight of `shape`, [..., N, K]."""
    *leading, N, K = shape
    return (*leading, N // ROWS, K // COLUMNS, SIZE)


def logical_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [..., N, K] of a weight whose tiles have `shape`."""
    *leading, n_tiles, k_tiles, _ = shape
    return (*leading, n_tiles * ROWS, k_tiles * COLUMNS)
