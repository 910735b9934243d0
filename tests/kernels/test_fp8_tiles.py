"""FP8 weights in tiles: their order by definition, and products with the bits of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, formats, fp8_tiles
from pallas_kernels.block_gemm.api import linear
from pallas_kernels.device import B200, H200
from pallas_kernels.moe.reference import ExpertWeights
from tests.kernels.compiled import dequantize, referenced
from tests.kernels.experts import moe

THREADS, LANES = 128, 32


def fp8(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.float8_e4m3fn)


def scales(seed: int, *shape: int) -> jax.Array:
    return jnp.exp(jax.random.normal(jax.random.key(seed), shape))


def test_a_thread_finds_the_registers_of_the_first_operand_of_wgmma_in_loads_of_16_bytes():
    """PTX, "Register fragments for wgmma.mma_async.m64nNk16", matrix A: of each 8 columns a thread
    has two in row `g` and two in row `g + 8` of the 16 rows of its warp."""
    numbers = np.arange(128 * 256).reshape(128, 256)
    tile = np.asarray(fp8_tiles.arrange(jnp.asarray(numbers)))[1, 1].reshape(4, THREADS, 16)
    block = numbers[64:, 128:]
    for thread in range(THREADS):
        warp, (g, t) = thread // LANES, divmod(thread % LANES, 4)
        rows = [16 * warp + g, 16 * warp + g + 8]
        wanted = [block[r, 8 * i + 2 * t + j] for i in range(16) for r in rows for j in range(2)]
        assert tile[:, thread].ravel().tolist() == wanted


def test_tiles_are_the_same_numbers_in_another_order():
    values, scale = fp8(0, 3, 192, 256), scales(1, 3, 2, 2)
    tiles = fp8_tiles.arrange(values)
    assert tiles.shape == fp8_tiles.tiled_shape(values.shape) == (3, 3, 2, 8192)
    assert (fp8_tiles.restore(tiles) == values).all()
    assert formats.kind(tiles, scale) == "fp8_tiles"
    assert formats.logical_shape(tiles, scale) == values.shape
    both = [dequantize(x, scale, jnp.float32) for x in (tiles, values)]
    assert np.array_equal(*both)


def test_what_is_no_weight_in_tiles_is_refused():
    with pytest.raises(ValueError, match="64 rows and 128 columns"):
        fp8_tiles.arrange(fp8(0, 96, 128))
    assert not fp8_tiles.fits(96, 128)
    for shape, scale in (((1, 1, 4096), (1, 1)), ((2, 1, 8192), (2, 1))):
        with pytest.raises(ValueError, match="does not fit"):
            formats.kind(fp8(0, *shape), scales(0, *scale))


def test_only_hopper_has_products_with_tiles():
    weight = fp8_tiles.arrange(fp8(0, 64, 128))
    product = lambda: linear(
        jnp.ones((8, 128), jnp.bfloat16), weight, scale=scales(0, 1, 1), implementation="mosaic_gpu"
    )
    with dispatch.assume(B200), pytest.raises(NotImplementedError):
        jax.eval_shape(product)
    with dispatch.assume(H200):
        assert jax.eval_shape(product).shape == (8, 64)


# N ends inside of a block of 128 rows; chunks of K, and two warpgroups with 70 rows; one scale for
# each row.
@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize(
    ("R", "N", "K", "scale"),
    [
        (5, 192, 384, (2, 3)),
        (20, 320, 640, (3, 5)),
        (70, 320, 640, (3, 5)),
        (13, 192, 384, (192, 1)),
    ],
)
def test_a_product_has_the_bits_of_one_with_rows(race_free, R, N, K, scale):
    x = common_rows(2, R, K)
    values, scale = fp8(R, N, K), scales(3, *scale)
    product = lambda x, weight: linear(
        x, weight, scale=scale, implementation="mosaic_gpu", out_dtype=jnp.float32
    )
    tiles = fp8_tiles.arrange(values)
    found = product(x, tiles)
    assert np.array_equal(found, product(x, values))
    assert np.array_equal(found, product(x.astype(jnp.float16), tiles))
    wanted = referenced(linear, x.astype(jnp.float32), tiles, scale=scale)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("R", [3, 20])
def test_experts_have_the_bits_of_those_with_rows(race_free, R):
    E, D, F, top_k = 4, 256, 128, 2
    keys = jax.random.split(jax.random.key(R), 3)
    x = common_rows(R, R, D)
    ids = jnp.argsort(jax.random.normal(keys[1], (R, E)), axis=1)[:, :top_k].astype(jnp.int32)
    weights = jax.random.uniform(keys[2], (R, top_k))
    gate_up = ExpertWeights(fp8(1, E, 2, F, D), 0.1 * scales(2, E, 2, 1, 2), None)
    down = ExpertWeights(fp8(3, E, D, F), scales(4, E, 2, 1), None)
    tiled = [w._replace(values=fp8_tiles.arrange(w.values)) for w in (gate_up, down)]
    found = moe(x, ids, weights, *tiled, implementation="mosaic_gpu")
    assert np.array_equal(found, moe(x, ids, weights, gate_up, down, implementation="mosaic_gpu"))
    half = moe(x.astype(jnp.float16), ids, weights, *tiled, implementation="mosaic_gpu")
    assert half.dtype == jnp.bfloat16
    assert np.array_equal(found, half)
    referred = moe(x.astype(jnp.float16), ids, weights, *tiled, implementation="reference")
    assert referred.dtype == jnp.bfloat16
    most = float(jnp.abs(found).max())
    np.testing.assert_allclose(*map(np.float32, (referred, found)), atol=2**-7 * most)


@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_float16_rows_are_nearer_to_the_product(implementation):
    values, scale = fp8(0, 64, 256), scales(1, 1, 2)
    rows = jax.random.normal(jax.random.key(2), (8, 256))
    wanted = np.float64(rows) @ np.float64(formats.dequantize(values, scale, jnp.float32)).T

    def error(dtype):
        given = rows.astype(dtype), fp8_tiles.arrange(values)
        how = dict(scale=scale, out_dtype=jnp.float32, implementation=implementation)
        return np.abs(linear(*given, **how) - wanted).max()

    assert error(jnp.float16) < error(jnp.bfloat16) / 4
    stream = linear(rows.astype(jnp.float16), fp8_tiles.arrange(values), scale=scale)
    assert stream.dtype == jnp.bfloat16


def common_rows(seed: int, R: int, K: int) -> jax.Array:
    """Random rows bfloat16 [R, K] that float16 represents too."""
    x = jax.random.normal(jax.random.key(seed), (R, K), jnp.bfloat16)
    return x.astype(jnp.float16).astype(jnp.bfloat16)
