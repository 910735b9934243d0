"""Kernels of mxfp4 and per-row fp8 weights, in Mosaic's interpreter, against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_gemm.api import linear
from pallas_kernels.formats import kernel_refusal
from pallas_kernels.moe.reference import ExpertWeights
from tests.kernels import compiled
from tests.kernels.compiled import dequantize
from tests.kernels.experts import moe

pytestmark = pytest.mark.sampled(1)

KERNEL = "mosaic_gpu"
both_chips = pytest.mark.usefixtures("chip")


def packed(*shape: int, seed: int = 0, low: int = 110, high: int = 131) -> tuple:
    """Values and scales of mxfp4 weights `shape`: codes from low to high - 1."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    return jnp.asarray(values), jnp.asarray(
        rng.integers(low, high, (*shape[:-1], shape[-1] // 32), np.uint8)
    )


def per_row(*shape: int, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.normal(size=shape), jnp.float8_e4m3fn)
    return values, jnp.asarray(rng.uniform(0.1, 2, (*shape[:-1], 1)), jnp.float32)


def rows(R: int, K: int, seed: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (R, K)).astype(jnp.bfloat16)


def product(x, values, scale) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and the sum of sizes that bounds how far a float32 sum may be from it."""
    weight = np.asarray(dequantize(values, scale, jnp.float32), np.float64).T
    x = np.asarray(x, np.float64)
    return x @ weight, np.abs(x) @ np.abs(weight)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.usefixtures("race_free")
@pytest.mark.parametrize(("R", "N", "K"), [(8, 144, 320), (9, 64, 768), (1, 80, 64)])
@both_chips
def test_mxfp4_products_are_exact_but_for_the_order_of_sums(R, N, K):
    """K is no multiple of a step and N none of a tile, but for the second."""
    values, scale = packed(N, K)
    x = rows(R, K)
    found = linear(x, values, scale=scale, out_dtype=jnp.float32, implementation=KERNEL)
    wanted, size = product(x, values, scale)
    assert np.all(np.abs(found - wanted) <= 1e-6 * size)


@pytest.mark.sampled(1, slow=0)
@pytest.mark.usefixtures("race_free")
@both_chips
def test_every_code_and_the_whole_documented_range_of_scales():
    """A unit vector per column reads weights one by one."""
    N, K = 128, 64
    codes = np.random.default_rng(0).integers(0, 256, (N, K // 2), np.uint8)
    scale = np.linspace(70, 192, 2 * N).astype(np.uint8).reshape(N, 2)  # lower: CPUs flush results
    found = linear(
        jnp.eye(K, dtype=jnp.bfloat16),
        jnp.asarray(codes),
        scale=jnp.asarray(scale),
        out_dtype=jnp.float32,
        implementation=KERNEL,
    )
    assert np.array_equal(found.T, dequantize(jnp.asarray(codes), jnp.asarray(scale), jnp.float32))


@pytest.mark.parametrize(("K", "fits"), [(65536, True), (131072, False)])
def test_a_tile_that_does_not_fit_into_shared_memory_is_refused(K, fits):
    """The scales of a whole row of tiles lie in shared memory, of which a block has 227 KB."""
    made = jax.ShapeDtypeStruct
    weight = made((320, K // 2), jnp.uint8), made((320, K // 32), jnp.uint8)
    run = lambda x, w, scale: linear(x, w, scale=scale, implementation=KERNEL)
    call = lambda: jax.eval_shape(run, made((64, K), jnp.bfloat16), *weight)
    if fits:
        assert call().shape == (64, 320)
        return
    with pytest.raises(NotImplementedError, match=r"232448 bytes.*use implementation='reference'"):
        call()


@pytest.mark.usefixtures("race_free")
@both_chips
def test_per_row_fp8():
    values, scale = per_row(80, 144)
    x = rows(9, 144)
    found = linear(x, values, scale=scale, out_dtype=jnp.float32, implementation=KERNEL)
    wanted, size = product(x, values, scale)
    assert np.all(np.abs(found - wanted) <= 1e-6 * size)


def experts(make, E: int, F: int, D: int, dtype=jnp.bfloat16) -> tuple:
    rng = np.random.default_rng(5)
    made = []
    for seed, shape in enumerate([(E, 2, F, D), (E, D, F)]):
        bias = jnp.asarray(rng.normal(size=shape[:-1]), dtype)
        made.append(ExpertWeights(*make(*shape, seed=seed), bias))
    return tuple(made)


def routed(R: int, E: int, k: int = 2) -> tuple:
    logits = jax.random.normal(jax.random.key(R), (R, E)) * 2
    weights, ids = compiled.routed(logits, k, True)
    return ids, weights


def small(*shape: int, seed: int) -> tuple:
    return packed(*shape, seed=seed, low=118, high=124)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.usefixtures("race_free")
@pytest.mark.parametrize(
    ("make", "R", "F", "D"), [(small, 3, 128, 320), (small, 17, 64, 64), (per_row, 3, 64, 128)]
)
@both_chips
def test_experts_with_bias_and_limit(make, R, F, D):
    """17 rows are sorted by expert; D of 320 is a step and a quarter."""
    E, x = 3, rows(R, D)
    both, routing = experts(make, E, F, D), routed(R, E)
    found = moe(x, *routing, *both, limit=1.5, implementation=KERNEL)
    wanted = compiled.moe(x, *routing, *both, 1.5)
    found, wanted = (np.asarray(y, np.float32) for y in (found, wanted))
    assert np.allclose(found, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())


def test_what_kernels_read_is_said():
    values, scale = packed(64, 192)
    assert kernel_refusal(values, scale) is None
    assert kernel_refusal(*per_row(64, 128)) is None
    assert "16 bytes" in kernel_refusal(*packed(36, 64))
    assert "64 columns" in kernel_refusal(*packed(64, 96))
    values, scale = per_row(256, 256)
    assert "blocks or rows" in kernel_refusal(values, jnp.ones((256, 2), jnp.float32))


def registers(x: np.ndarray, layout) -> np.ndarray:
    """[registers, warps, lanes, vector]: elements of x by thread, as Mosaic lays them out."""
    for tile in layout.tiling.tiles:
        outer = x.shape[: x.ndim - len(tile)]
        pairs = [(size // t, t) for size, t in zip(x.shape[len(outer) :], tile, strict=True)]
        x = x.reshape(*outer, *(n for pair in pairs for n in pair))
        at, end = len(outer), x.ndim
        x = x.transpose(*range(at), *range(at, end, 2), *range(at + 1, end, 2))
    threads = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    threads = [
        axis for axis in threads if isinstance(axis, int)
    ]  # others are copies, of which there is one
    x = np.moveaxis(x, threads, range(-len(threads), 0))
    return x.reshape(-1, 4, 32, x.shape[-1])


@pytest.mark.parametrize("half", [0, 1])
def test_threads_hold_the_columns_that_they_are_to_multiply(half):
    """The values of the unpacked registers, which the interpreter does not check."""
    from pallas_kernels import mlir_compat as mlir
    from pallas_kernels.weight_tiles.mxfp4 import STEP, arrange

    numbers = np.arange(64 * STEP).reshape(64, STEP)  # of the weights of a tile
    wanted = np.asarray(arrange(jnp.asarray(numbers)))[:, half * 128 : half * 128 + 128]
    wanted = registers(wanted, mlir.WGMMA_LAYOUT)
    first = registers(numbers[:, ::2], mlir.WGMMA_LAYOUT_8BIT)  # of each byte
    nibbles = np.stack([first, first + 1], axis=-1).reshape(-1, 2, 4, 32, 8)
    found = np.stack([nibbles[..., i::4] for i in range(4)], axis=1)[4 * half : 4 * half + 4]
    assert np.array_equal(found.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("group", [0, 7])
def test_threads_of_blackwell_hold_the_columns_that_they_are_to_store(group):
    """Bytes 16 .. 31 of a thread's row are group 1, stored in arranged order."""
    from pallas_kernels import mlir_compat as mlir
    from pallas_kernels.weight_tiles.mxfp4 import STEP, arrange

    numbers = np.arange(128 * STEP).reshape(128, STEP)
    columns = slice(32 * group, 32 * group + 32)
    wanted = np.asarray(arrange(jnp.asarray(numbers)))[:, columns]
    wanted = registers(wanted, mlir.tmem_native_layout(2))
    first = registers(numbers[:, ::2], mlir.tmem_native_layout(16))[group]  # of each byte
    words = np.stack([first, first + 1], axis=-1).reshape(4, 32, 4, 8)  # [warp, lane, j, nibble]
    pairs = np.stack([words[..., i::4] for i in range(4)])  # [i, warp, lane, j, h]
    assert np.array_equal(np.moveaxis(pairs, 3, 1).reshape(wanted.shape), wanted)
