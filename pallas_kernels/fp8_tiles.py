"""FP8 weights in the order in which Hopper's threads multiply them.

A weight [N, K] is divided into tiles of 64 rows and 128 columns. A tile is 8 KB without gaps: one bulk copy, and
each thread of a warpgroup then loads its 64 numbers 16 bytes at a time, already in the order of the registers of
wgmma's first operand. In the plain order threads load 4 bytes at a time, and then exchange half of them.

    number of a tile      row                   column
    w h g, c q t j        16 w + 8 h + g        32 c + 8 q + 2 t + j

Here w is the warp, 8 x 4 lanes are (g, t), and a thread holds the numbers of all c, q, h and j, in this order. A tile
stores [c, w, g, t, q, h, j]. The order inside a tile changes no sum.
"""

import jax

ROWS, COLUMNS = 64, 128
"""Rows and columns of a tile."""
SIZE = ROWS * COLUMNS
"""Numbers, and bytes, of a tile."""
LOAD = 16
"""Bytes that a thread loads at once."""

_ROW, _COLUMN = (4, 2, 8), (4, 4, 4, 2)  # w h g, c q t j
_STORED = (4, 0, 2, 6, 5, 1, 7)  # c w g t q h j, as axes of [w, h, g, tile, c, q, t, j]


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
    parts = values.reshape(*leading, N // ROWS, *_ROW, K // COLUMNS, *_COLUMN)
    n = len(leading) + 1
    order = (*range(n), n + 3, *(n + axis for axis in _STORED))
    return parts.transpose(order).reshape(tiled_shape(values.shape))


def restore(tiles: jax.Array) -> jax.Array:
    """`arrange` undone: [..., N / 64, K / 128, 8192] -> [..., N, K]."""
    *leading, n_tiles, k_tiles, _ = tiles.shape
    sizes = dict(zip((0, 1, 2, 4, 5, 6, 7), (*_ROW, *_COLUMN), strict=True))
    parts = tiles.reshape(*leading, n_tiles, k_tiles, *(sizes[axis] for axis in _STORED))
    n = len(leading) + 2
    place = {axis: n + i for i, axis in enumerate(_STORED)}
    rows, columns = [place[axis] for axis in (0, 1, 2)], [place[axis] for axis in (4, 5, 6, 7)]
    order = (*range(n - 1), *rows, n - 1, *columns)
    return parts.transpose(order).reshape(*leading, n_tiles * ROWS, k_tiles * COLUMNS)


def tiled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tiles of a weight of `shape`, [..., N, K]."""
    *leading, N, K = shape
    return (*leading, N // ROWS, K // COLUMNS, SIZE)


def logical_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [..., N, K] of a weight whose tiles have `shape`."""
    *leading, n_tiles, k_tiles, _ = shape
    return (*leading, n_tiles * ROWS, k_tiles * COLUMNS)
