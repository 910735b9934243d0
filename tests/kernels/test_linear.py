"""Linear layers over plain, fp8 and mxfp4 weights against float64, and against unpacked ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_gemm.api import linear
from pallas_kernels.block_gemm.reference import TILE
from tests.kernels.compiled import dequantize

pytestmark = pytest.mark.sampled(1)

FORMATS = ("plain", "fp8 blocks", "fp8 rows", "mxfp4")


def weight_of(form: str, N: int, K: int, seed: int = 0):
    """Values and scale of a random weight whose elements are about 1 or less."""
    rng = np.random.default_rng(seed)
    if form == "plain":
        return jnp.asarray(rng.normal(size=(N, K)), jnp.float32), None
    if form == "mxfp4":
        values = rng.integers(0, 256, (N, K // 2), np.uint8)
        return jnp.asarray(values), jnp.asarray(rng.integers(123, 127, (N, K // 32)), jnp.uint8)
    values = jnp.asarray(rng.uniform(-448, 448, (N, K)), jnp.float8_e4m3fn)
    shape = (N, 1) if form == "fp8 rows" else (-(-N // 128), -(-K // 128))
    return values, jnp.asarray(rng.uniform(1e-3, 1e-2, shape), jnp.float32)


def rows(R: int, K: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(R), (R, K)).astype(dtype)


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize("N", [40, TILE, TILE + 1, 2 * TILE + 300])
@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_multiplies_as_in_float64(form, N):
    """Over one tile, a tile and a row, two tiles and a ragged rest; K ragged in blocks of 128."""
    K = 160
    values, scale = weight_of(form, N, K)
    x, bias = rows(5, K), jax.random.normal(jax.random.key(1), (N,))
    weight = np.asarray(dequantize(values, scale, jnp.float32), np.float64)
    wanted = np.asarray(x, np.float64) @ weight.T + np.asarray(bias, np.float64)
    found = linear(x, values, scale=scale, bias=bias)
    bound = 1e-6 * (np.abs(x) @ np.abs(weight).T + np.abs(bias))
    assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("N", [96, TILE + 96])
@pytest.mark.parametrize("form", FORMATS)
def test_bfloat16_rows_meet_the_weight_rounded_to_bfloat16(form, N):
    values, scale = weight_of(form, N, 64)
    x = rows(7, 64, jnp.bfloat16)
    weight = np.asarray(dequantize(values, scale, jnp.bfloat16), np.float64)
    wanted = np.asarray(x, np.float64) @ weight.T
    wide = linear(x, values, scale=scale, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    assert np.allclose(wide, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    narrow = linear(x, values, scale=scale)
    assert narrow.dtype == jnp.bfloat16
    assert np.allclose(np.asarray(narrow, np.float64), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("form", ["plain", "fp8 blocks"])
def test_a_bfloat16_row_alone_has_the_bits_of_one_in_company(form):
    values, scale = weight_of(form, 768, 256)
    values = values if scale is not None else values.astype(jnp.bfloat16)
    x = rows(8, 256, jnp.bfloat16)
    product = jax.jit(lambda x: linear(x, values, scale=scale, out_dtype=jnp.float32))
    assert (product(x[:1]) == product(x)[:1]).all()
    assert (product(x[None, :1])[0] == product(x[0])).all()


@pytest.mark.parametrize("form", FORMATS[1:])
def test_only_a_tile_is_ever_unpacked(form):
    N, K = 16 * TILE, 256
    values, scale = weight_of(form, N, K)
    multiply = jax.jit(lambda x, values, scale: linear(x, values, scale=scale))
    memory = multiply.lower(rows(1, K), values, scale).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * (4 * TILE * K)  # the whole weight has 16 tiles


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(x=rows(2, 32), weight=rows(4, 33)), "inner widths"),
        (dict(x=rows(2, 32), weight=rows(4, 32)[None, None]), "two axes"),
        (dict(x=rows(2, 32), weight=rows(4, 32), bias=jnp.zeros(5)), "bias"),
        (dict(x=rows(2, 32), weight=rows(4, 32), scale=jnp.ones((1, 1))), "with a scale"),
        (dict(x=rows(2, 32), weight=jnp.zeros((4, 16), jnp.uint8)), "without a scale"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, says):
    x, weight = arguments.pop("x"), arguments.pop("weight")
    with pytest.raises(ValueError, match=says):
        linear(x, weight, **arguments)
