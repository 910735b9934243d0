"""Linear layers in Mosaic's interpreter: results, and rows whose bits depend on no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, formats
from pallas_kernels.block_gemm import mosaic_gpu
from pallas_kernels.block_gemm.api import add_in_order, linear
from pallas_kernels.block_gemm.mosaic_gpu import TuningConfig
from pallas_kernels.device import GENERATIONS, H200
from pallas_kernels.weight_tiles.codecs import STEP
from tests.kernels.compiled import dequantize

pytestmark = pytest.mark.sampled(1)

both_chips = pytest.mark.usefixtures("chip")
FORMATS = ("bf16", "fp8")
# K of bfloat16 ends inside of a step of 128 columns, N inside of a block of 128 rows.
SHAPES = {"bf16": (192, 448), "fp8": (192, 384)}
N_WIDE = 320
"""Too many rows for a router, so that K is cut into chunks."""


def operands(form: str, R: int, N: int, K: int):
    """x [R, K], values [N, K], scale or None."""
    keys = jax.random.split(jax.random.key(N + K), 3)
    x = jax.random.normal(keys[0], (R, K), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (N, K))
    if form == "bf16":
        return x, weight.astype(jnp.bfloat16), None
    shape = (-(-N // formats.BLOCK), -(-K // formats.BLOCK)) if form == "fp8" else (N, 1)
    scale = jnp.asarray(np.exp(jax.random.normal(keys[2], shape)))
    return x, weight.astype(jnp.float8_e4m3fn), scale


def in_float64(x, values, scale) -> np.ndarray:
    """[R, N] with the weight as its format gives it, unrounded."""
    weight = np.asarray(dequantize(values, scale, jnp.float32), np.float64)
    return np.asarray(x, np.float64) @ weight.T


def assert_sums(found: jax.Array, x, values, scale, bias=0.0):
    """To the rounding of float32 sums."""
    weight = np.abs(np.asarray(dequantize(values, scale, jnp.float32), np.float64))
    bound = 1e-6 * (np.abs(np.asarray(x, np.float64)) @ weight.T + np.abs(bias))
    assert (np.abs(found - in_float64(x, values, scale) - bias) <= bound).all()


def kernel(x, values, scale, **options):
    return linear(x, values, scale=scale, implementation="mosaic_gpu", **options)


def product(x, values, scale, config: TuningConfig) -> jax.Array:
    launch = dispatch.resolve("block_gemm", "mosaic_gpu")
    return mosaic_gpu.product(x, values, scale, config, launch)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("R", [1, 3, 11, 12, 21])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("race_free")
@both_chips
def test_the_kernel_multiplies_any_number_of_rows(form, R):
    x, *weight = operands(form, R, *SHAPES[form])
    assert_sums(kernel(x, *weight, out_dtype=jnp.float32), x, *weight)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("K", [64, 384, 1024])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("race_free")
@both_chips
def test_chunks_need_not_divide_the_width(form, K):
    """Two chunks of three steps have two steps each: the last step is past the end."""
    x, *weight = operands(form, 8, N_WIDE, K)
    for split in (False, True):
        parts = product(x, *weight, TuningConfig(8, 2, split, stages=2))
        assert parts.shape == (2 if split else 1, 8, N_WIDE)
        assert_sums(add_in_order(parts), x, *weight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS)
def test_bias_and_dtype_come_after_the_sum_in_float32(form):
    x, *weight = operands(form, 3, *SHAPES[form])
    bias = jnp.linspace(-9, 9, weight[0].shape[0], dtype=jnp.bfloat16)
    plain = kernel(x, *weight, out_dtype=jnp.float32)
    wide = plain + bias.astype(jnp.float32)
    assert np.array_equal(kernel(x, *weight, bias=bias, out_dtype=jnp.float32), wide)
    assert np.array_equal(kernel(x, *weight, bias=bias), wide.astype(jnp.bfloat16))
    assert np.array_equal(kernel(x, *weight), plain.astype(jnp.bfloat16))


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize(("chunks", "K"), [(2, 512), (3, 640)])
@pytest.mark.parametrize("form", [*FORMATS, "fp8 rows"])
@both_chips
def test_blocks_of_their_own_give_the_bits_of_one_block(form, chunks, K):
    x, *weight = operands(form, 16, N_WIDE, K)
    whole = product(x, *weight, TuningConfig(16, chunks, False, stages=3))
    parts = product(x, *weight, TuningConfig(16, chunks, True, stages=2))
    assert (whole.shape[0], parts.shape[0]) == (1, chunks)
    assert np.array_equal(add_in_order(parts), whole[0])


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("form", FORMATS)
@both_chips
def test_a_row_has_the_same_bits_in_any_company(form):
    """However many rows there are, in whatever tile: of 8, 16, 32 or 64, padded or not.

    The interpreter's product of one step rounds as a CPU pleases, so those here are whole numbers;
    what a step, a block's scale and a chunk add is rounded.
    """
    x, values, scale = operands(form, 72, N_WIDE, 384)
    x, values = jnp.round(4 * x), jnp.round(4 * values.astype(jnp.float32)).astype(values.dtype)
    if form == "bf16":  # every step has a size of its own, as a scale gives it in fp8
        sizes = jnp.array([1.0, 2.0**-13, 2.0**9]).repeat(STEP)
        values = values * sizes.astype(values.dtype)
    whole = np.asarray(kernel(x, values, scale, out_dtype=jnp.float32))
    assert (whole != in_float64(x, values, scale)).mean() > 0.5
    for R in (1, 8, 11, 21):
        for start in (0, 40):
            rows = slice(start, start + R)
            alone = kernel(x[rows], values, scale, out_dtype=jnp.float32)
            assert np.array_equal(alone, whole[rows]), (R, start)


WIDTHS = (
    *((5120, 2048), (2048, 4096), (128, 2048), (151936, 2048), (2048, 6144), (24576, 2048)),
    *((2048, 12288), (5120, 2880), (32, 2880), (28672, 4096), (4096, 14336), (43008, 5376)),
    *((5376, 21504), (224, 448), (192, 384)),
)
"""[N, K] of matrices of Qwen3-30B, its head, GPT-OSS-20B, Llama-3.1-8B and Gemma-4-31B, and ragged
ones."""


@pytest.mark.parametrize("device", GENERATIONS.values(), ids=lambda one: one.arch)
def test_tuning_leaves_the_arithmetic_alone(device):
    """Chunks, which a result depends on, follow from the weight; a split has work."""
    for N, K in WIDTHS:
        configs = [TuningConfig.choose(R, N, K, device) for R in (1, 8, 12, 21, 64, 256, 4096)]
        assert len({config.chunks for config in configs}) == 1
        assert all(config.chunks > 1 or not config.split for config in configs)


def test_the_last_blocks_of_a_wide_weight_do_not_run_alone():
    stages = lambda R, N, K: TuningConfig.choose(R, N, K, H200, "fp8_tiles", jnp.float16).stages
    llama, gemma = (28672, 4096), (43008, 5376)
    assert [stages(R, *llama) for R in (8, 16, 32, 64)] == [4, 4, 2, 4]
    assert [stages(R, *gemma) for R in (8, 16, 32, 64)] == [3, 2, 4, 4]


def refused(change: str) -> dict:
    x, values, scale = operands("fp8", 8, 256, 256)
    match change:
        case "float32 rows":
            x = x.astype(jnp.float32)
        case "float32 weight":
            values, scale = values.astype(jnp.float32), None
        case "odd rows":
            values, scale = jnp.zeros((252, 256), jnp.bfloat16), None
        case "odd columns":
            x, values, scale = x[:, :252], jnp.zeros((256, 252), jnp.bfloat16), None
    return dict(x=x, weight=values, scale=scale)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("float32 rows", "activations must be bfloat16, not float32"),
        ("float32 weight", "plain weights must be bfloat16, not float32"),
        ("odd rows", "units of 16 bytes"),
        ("odd columns", "units of 16 bytes"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(change, why):
    arguments = refused(change)
    with pytest.raises(NotImplementedError, match=f"block_gemm .*{why}"):
        linear(**arguments, implementation="mosaic_gpu")
    assert linear(**arguments).shape == (8, arguments["weight"].shape[0])
