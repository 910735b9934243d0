"""Several warpgroups of a block, tiles of up to 256 tokens: the bits of one and of small tiles."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, formats, fp8_tiles
from pallas_kernels.block_gemm import mosaic_gpu as block_gemm
from pallas_kernels.device import H200

pytestmark = pytest.mark.sampled(1)

race_free = pytest.mark.usefixtures("race_free")
FORMS = ("bf16", "fp8", "fp8_rows", "mxfp4")


def whole(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Numbers whose product of one step is exact in the interpreter, whatever its shape."""
    return jnp.round(3 * jax.random.normal(jax.random.key(seed), shape))


def weight(form: str, *shape: int, seed: int = 0) -> tuple[jax.Array, jax.Array | None]:
    """[..., N, K] with steps of different sizes, so that adding them up rounds."""
    *leading, N, K = shape
    key = jax.random.key(seed + 100)
    step = jnp.arange(K) // 128
    if form == "mxfp4":
        values = jax.random.randint(key, (*leading, N, K // 2), 0, 256).astype(jnp.uint8)
        codes = 112 + 20 * (jnp.arange(K // formats.GROUP) // 8 % 2)
        return values, jnp.broadcast_to(codes, (*leading, N, K // formats.GROUP)).astype(jnp.uint8)
    values = whole(shape, seed)
    if form == "fp8_tiles":
        values, scale = weight("fp8", *shape, seed=seed)
        return fp8_tiles.arrange(values), scale
    if form == "bf16":
        return (values * jnp.array([1, 2.0**-13, 2.0**9])[step % 3]).astype(jnp.bfloat16), None
    cut = (N, 1) if form == "fp8_rows" else (-(-N // formats.BLOCK), -(-K // formats.BLOCK))
    scale = jnp.exp(3 * jax.random.normal(key, (*leading, *cut)))
    if form == "fp8_rows":
        values = values * jnp.array([1, 2.0**-6])[step % 2]
    return values.astype(jnp.float8_e4m3fn), scale


def launch(device=H200) -> dispatch.Launch:
    return dispatch.resolve("a product", "mosaic_gpu", chips=(device.sm,))


@functools.cache
def product(form: str, shape: tuple[int, int, int], *config, num_sms: int = 132) -> np.ndarray:
    R, N, K = shape
    x = whole((R, K), 1).astype(jnp.bfloat16)
    config = block_gemm.TuningConfig(*config)
    on_chip = launch()._replace(device=replace(H200, num_sms=num_sms))
    return np.asarray(block_gemm.product(x, *weight(form, N, K), config, on_chip))


SHAPES = {
    "bf16": (72, 144, 320),  # K ends within a step, rows of the weight within a tile
    "fp8": (72, 144, 640),
    "fp8_rows": (72, 80, 384),
    "mxfp4": (72, 80, 576),
    "fp8_tiles": (72, 192, 640),
}
"""Of R, N, K: 72 rows are two tiles of 64, or a part of one of 128."""


@pytest.mark.sampled(1, slow=2)
@race_free
@pytest.mark.parametrize(
    ("form", "tokens", "groups", "split"),
    [
        *[(form, 128, 2, False) for form in FORMS],
        ("bf16", 32, 2, True),
        ("bf16", 128, 1, True),
        ("fp8", 64, 2, True),
        ("fp8", 128, 1, False),
        *[("bf16", tokens, 4, False) for tokens in (64, 128)],
        *[("bf16", 128, 3, False), ("fp8_tiles", 64, 3, False)],
        *[("fp8_tiles", tokens, 2, split) for tokens in (128, 256) for split in (False, True)],
        *[(form, 192, 2, False) for form in ("bf16", "fp8_tiles")],
    ],
)
def test_products_have_the_same_bits(form, tokens, groups, split):
    """With 144 rows of the weight the last of two warpgroups has none."""
    shape = SHAPES[form]
    wanted = product(form, shape, 64, 2, split, 3)
    assert np.array_equal(product(form, shape, tokens, 2, split, 2, groups), wanted)


@pytest.mark.sampled(0, slow=2)
@race_free
@pytest.mark.parametrize(
    ("form", "shape", "split", "num_sms"),
    [
        # Blocks of 3, 3 and 2 units; the last row tile is half empty.
        ("bf16", (200, 144, 320), False, 3),
        # Units of one step.
        ("fp8", (136, 272, 256), True, 5),
        # 12 units of one block; rows and columns end within a tile.
        ("bf16", (136, 144, 320), True, 1),
        ("fp8", (72, 272, 640), True, 5),  # 3 row tiles, 2 token tiles, 2 splits
        ("fp8_rows", (72, 80, 384), False, 1),
        ("fp8_tiles", (136, 192, 640), True, 5),
    ],
)
def test_a_block_of_several_units_has_the_bits_of_one_for_each(form, shape, split, num_sms):
    config = 64, 2, split, 3, 2
    found = product(form, shape, *config, num_sms=num_sms)
    assert np.array_equal(found, product(form, shape, *config))
