"""The largest output of a linear layer: its kernels in Mosaic's interpreter against `jnp.argmax`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.block_gemm.mosaic_gpu import TuningConfig
from pallas_kernels.device import GENERATIONS
from pallas_kernels.linear_argmax import mosaic_gpu
from pallas_kernels.linear_argmax.api import CHIPS, linear_argmax
from pallas_kernels.linear_argmax.specs import SPECS

pytestmark = pytest.mark.sampled(2)

both_chips = pytest.mark.usefixtures("chip")
N_RAGGED = 328
"""Ends inside of a tile of 64 rows and of 128, and K is cut into chunks."""


def operands(R: int, N: int, K: int) -> tuple[jax.Array, jax.Array]:
    """x [R, K] and a weight [N, K] of small whole numbers: outputs are exact, and each occurs twice."""
    keys = jax.random.split(jax.random.key(R + N + K))
    draw = lambda key, shape: jax.random.randint(key, shape, -1, 2).astype(jnp.bfloat16)
    return draw(keys[0], (R, K)), jnp.tile(draw(keys[1], (N // 2, K)), (2, 1))


def kernel(x, weight, **options):
    return linear_argmax(x, weight, implementation="mosaic_gpu", **options)


def assert_largest(found: tuple, y: np.ndarray):
    index, maximum = map(np.asarray, found)
    assert (index.dtype, maximum.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(index, np.asarray(jnp.argmax(y, axis=-1)))
    np.testing.assert_array_equal(maximum, np.asarray(y).max(-1))


@pytest.mark.sampled(2, slow=5)
@pytest.mark.parametrize("R", [1, 3, 12, 21, 72])
@pytest.mark.usefixtures("race_free")
@both_chips
def test_of_equal_outputs_the_lowest_index_is_found(R):
    x, weight = operands(R, N_RAGGED, 64)
    y = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    assert ((y == y.max(-1, keepdims=True)).sum(-1) > 1).all()
    assert_largest(kernel(x, weight), y)


@pytest.mark.parametrize("N", [8, 64, 200])
@pytest.mark.usefixtures("race_free")
@both_chips
def test_outputs_past_the_last_one_do_not_count(N):
    """All outputs are negative, and those past the last one would be 0."""
    x, weight = jnp.ones((5, 64), jnp.bfloat16), -jnp.ones((N, 64), jnp.bfloat16)
    assert_largest(
        kernel(x, weight.at[N - 1].set(-0.5)), np.tile([-64.0] * (N - 1) + [-32.0], (5, 1))
    )
    assert_largest(kernel(x, weight), np.full((5, N), -64.0))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.usefixtures("race_free")
@both_chips
def test_nan_and_infinities_are_ordered_as_by_argmax():
    """One weight column chooses the outputs: x has a single 1 in each row."""
    columns = np.ones((8, N_RAGGED), np.float32)
    columns[0, [70, 300]] = np.nan  # of two tiles
    columns[1, [3, 5]] = np.nan  # of one tile
    columns[2, [1, 140]] = np.inf, np.nan  # a NaN after +inf
    columns[3, [130, 4]] = np.inf
    columns[4] = -np.inf
    columns[5] = -np.inf
    columns[5, 200] = -3
    columns[6] = np.nan
    columns[7, ::2] = -0.0
    columns[7, 1::2] = 0.0
    for row in columns:  # alone: 0 times NaN of another column would be NaN
        x = jnp.zeros((1, 8), jnp.bfloat16).at[0, 0].set(1)
        weight = jnp.zeros((N_RAGGED, 8), jnp.bfloat16).at[:, 0].set(row.astype(jnp.bfloat16))
        assert_largest(kernel(x, weight), row[None])


@pytest.mark.sampled(1, slow=1)
@both_chips
def test_the_sums_are_those_of_the_layer_alone_and_in_company():
    """Outputs are rounded, and so the maximum shows the bits of a sum. K ends inside of the last of three chunks."""
    K, chunks = 576, 3
    keys = jax.random.split(jax.random.key(K))
    x = jax.random.normal(keys[0], (24, K), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (N_RAGGED, K), jnp.bfloat16)
    options = dict(implementation="mosaic_gpu", config=TuningConfig(8, chunks, False, stages=2))
    y = linear(x, weight, out_dtype=jnp.float32, **options)
    index, maximum = linear_argmax(x, weight, **options)
    assert_largest((index, maximum), y)
    for row in (0, 23):
        alone = linear_argmax(x[row : row + 1], weight, **options)
        assert [int(alone[0][0]), float(alone[1][0])] == [int(index[row]), float(maximum[row])]


@pytest.mark.usefixtures("race_free")
def test_many_rows_share_tiles_of_several_warpgroups():
    """Two and four warpgroups, the last of which have no rows of the weight, and sums stored in parts."""
    x, weight = operands(72, N_RAGGED, 64)
    y = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    for tokens, groups in ((64, 2), (128, 1), (64, 4)):
        config = TuningConfig(tokens, 1, False, stages=2, groups=groups)
        assert_largest(kernel(x, weight, config=config), y)


@pytest.mark.parametrize("tiles", [1, 64, 65, 700])
@pytest.mark.usefixtures("race_free")
def test_tiles_are_merged_to_the_lowest_index(tiles):
    """The tiles have many equal values; memory past them holds values that must not count."""
    launch = dispatch.resolve("linear_argmax", "mosaic_gpu", chips=CHIPS)
    rng = np.random.default_rng(tiles)
    padded = -(-tiles // 512) * 512 if tiles > 448 else -(-tiles // 64) * 64
    values = rng.integers(0, 3, (padded, 16)).astype(np.float32)
    index = np.arange(padded)[:, None] * 64 + rng.integers(0, 64, (padded, 16))
    ranks = (2**30 - 1 - index).astype(np.int32)
    values[tiles:], ranks[tiles:] = 9, 2**30 - 1
    found = mosaic_gpu.merge(jnp.asarray(values), jnp.asarray(ranks), tiles=tiles, launch=launch)
    first = values[:tiles].argmax(0)
    np.testing.assert_array_equal(found[0], np.take_along_axis(index, first[None], axis=0)[0])
    np.testing.assert_array_equal(found[1], values[:tiles].max(0))


def test_the_reference_is_the_argmax_of_the_layer():
    x, weight = operands(6, 200, 64)
    y = linear(x.reshape(2, 3, -1), weight, out_dtype=jnp.float32)
    found = linear_argmax(x.reshape(2, 3, -1), weight)
    assert found[0].shape == (2, 3)
    assert_largest(found, y)
    with jax.default_matmul_precision("highest"):
        scaled = linear_argmax(x, jnp.ones((128, 64), jnp.float8_e4m3fn), scale=jnp.ones((1, 1)))
    assert scaled[0].tolist() == [0] * 6


@pytest.mark.parametrize("device", GENERATIONS.values(), ids=lambda one: one.arch)
def test_a_config_without_a_split_keeps_the_chunks(device):
    for spec in SPECS.values():
        chosen = TuningConfig.choose(spec.rows, spec.outputs, spec.inputs, device)
        whole = chosen.whole()
        assert not whole.split
        assert whole.chunks == chosen.chunks
        assert whole == chosen or chosen.split


def test_wrong_arguments_are_refused():
    x, weight = operands(2, 64, 64)
    with pytest.raises(ValueError, match="two axes"):
        linear_argmax(x, weight[0])
    with pytest.raises(ValueError, match="inner widths differ"):
        linear_argmax(x[:, :32], weight)
    with pytest.raises(NotImplementedError, match=r"linear_argmax .*bfloat16, not float32"):
        kernel(x.astype(jnp.float32), weight)
