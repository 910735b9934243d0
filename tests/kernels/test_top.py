"""The largest values of rows: the kernel against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top.api import COUNT, top


def rows_of(width: int) -> np.ndarray:
    """Rows without ties, with many ties, with NaN, with few finite values, and with those at both
    ends.

    Rows 7 to 9 have equal values in different tiles: in all, in the last ones, and infinities
    beside NaN.
    """
    rng = np.random.default_rng(width)
    rows = rng.normal(size=(18, width)).astype(np.float32)
    rows[1] = np.round(rows[1])
    rows[2, : width // 2] = np.nan
    rows[3] = 0
    rows[4] = -np.inf
    rows[4, [0, 5, width - 1]] = 1, np.inf, 2
    rows[5] = -rng.permutation(width)
    rows[6] = np.sort(rows[6])
    rows[7] = np.arange(width) % 97 == 96
    rows[8] = np.arange(width) // 300
    rows[9, [width - 1, width - 65, 300]] = np.inf
    rows[9, 1::2] = np.nan
    return rows


OF_LONG = {
    9024: [0, 2, 4, 8, 9],
    16_384: [0, 2, 4, 8, 9],
    32_000: [0, 1, 7, 9],
    151_936: [0, 7, 9],
    2**19: [0, 1, 2],
}
"""Rows of widths that the interpreter takes long for."""


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(1024, marks=pytest.mark.exhaustive),  # a read, which divides the row
        1088,  # a second read, of which one chunk is new
        pytest.param(9024, marks=pytest.mark.slow),  # half of the last block does not exist
        pytest.param(
            16_448, marks=pytest.mark.slow
        ),  # tiles are chosen; one chunk of the last read is new
        pytest.param(151_936, marks=pytest.mark.slow),  # half of a tile at the end
        pytest.param(2**19, marks=pytest.mark.exhaustive),  # the longest
    ],
)
@pytest.mark.usefixtures("race_free")
def test_the_kernel_is_the_reference(width):
    rows = range(18) if width < 2000 else OF_LONG.get(width, range(10))
    values = jnp.asarray(rows_of(width))[jnp.array(rows)]
    ids, largest = (
        np.asarray(x)
        for x in top(values.reshape(1, *values.shape), COUNT, implementation="mosaic_gpu")
    )
    wanted, found = (np.asarray(x) for x in top(values, COUNT, implementation="reference"))
    np.testing.assert_array_equal(largest[0], found)
    clear = np.isfinite(found) | (found > 0)
    np.testing.assert_array_equal(ids[0][clear], wanted[clear])
    assert ((ids >= 0) & (ids < width)).all()


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("width", [1000, 33_000, 151_936])
def test_equal_values_are_in_the_order_of_their_indices(width):
    """Also where the reference searches tiles of a long row."""
    values = np.round(np.random.default_rng(0).normal(size=(40, width)), 1).astype(np.float32)
    ids, largest = (
        np.asarray(x) for x in top(jnp.asarray(values), COUNT, implementation="reference")
    )
    wanted = np.argsort(-values, axis=1, kind="stable")[:, :COUNT]
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(largest, np.take_along_axis(values, wanted, axis=1))


@pytest.mark.parametrize(
    ("shape", "dtype", "count", "why"),
    [
        ((2, 1024), jnp.float32, 8, "not 8"),
        ((2, 960), jnp.float32, 16, "960 values"),
        ((2, 1100), jnp.float32, 16, "1100 values"),
        ((2, 1024), jnp.bfloat16, 16, "bfloat16"),
        ((2, 2**19 + 64), jnp.float32, 16, "524352 values"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(shape, dtype, count, why):
    values = jax.random.normal(jax.random.key(0), shape, dtype)
    with pytest.raises(NotImplementedError, match=why):
        top(values, count, implementation="mosaic_gpu")
    assert top(values, count)[0].shape == (2, count)
