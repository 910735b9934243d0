"""Plain weights in the order in which a CPU reads them: tiles of 64 rows, column after column.

A weight [N, K] becomes [N / 64, K, 64], so a product streams through memory, and 64 outputs are
summed side by side. XLA's product of two or more rows with [N, K] rearranges the weight in each
call, takes 2.5 times as long as that of one row, and orders its sums in another way.
"""

import jax

ROWS = 64
"""Rows of a tile; with 32 or 96 products take longer."""


def fits(N: int) -> bool:
    """Whether a weight of N rows consists of whole tiles. XLA drops the axis of a single one, and
    the promise of `product` with it."""
    return N % ROWS == 0 and N > ROWS


def is_tiled(values: jax.Array, scale: jax.Array | None) -> bool:
    """Whether the weight of a linear layer or an embedding is in tiles."""
    return scale is None and len(values.shape) == 3


def arrange(values: jax.Array) -> jax.Array:
    """[N, K] -> tiles [N / 64, K, 64]."""
    return values.reshape(-1, ROWS, values.shape[1]).transpose(0, 2, 1)


def restore(tiles: jax.Array) -> jax.Array:
    """`arrange` undone."""
    return tiles.transpose(0, 2, 1).reshape(logical_shape(tiles.shape))


def logical_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(N, K) of tiles of `shape`."""
    return shape[0] * ROWS, shape[1]


def rows(tiles: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `ids` [...] int32 of the weight: [..., K]."""
    return tiles[ids // ROWS, :, ids % ROWS]


def product(x: jax.Array, tiles: jax.Array) -> jax.Array:
    """x [..., K] times the weight, [..., N].

    A row's bits do not depend on the number of rows, within jaxlib 0.11.2: a library of XLA takes
    the sum for a product, with one kernel for any number of rows.
    """
    # Without the barrier XLA may compute x anew for each tile, and products of several x with the
    # same tiles share copies of the tiles for all rows.
    flat, tiles = jax.lax.optimization_barrier((x.reshape(-1, x.shape[-1]), tiles))
    y = (flat[:, :, None] * tiles[:, None].astype(x.dtype)).sum(axis=2)  # [tiles, rows, 64]
    y = jax.lax.optimization_barrier(y)  # else a function of it joins the sum, in another order
    return y.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)
