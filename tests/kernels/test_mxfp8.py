"""Products of mxfp8 operands: their definition, the layout of scales, and the kernels in Mosaic's interpreter.

The interpreter lacks block-scaled products; `tests.kernels.block_scaled` stands in for them. That the kernels compile
for sm_100a with the block-scaled instruction and without spills, `test_compile.py` shows.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch, formats, mxfp8
from pallas_kernels.activations import rounding
from pallas_kernels.block_gemm import mosaic_gpu
from pallas_kernels.block_gemm.api import MXFP8_CHIPS, add_in_order, linear, partial_products
from pallas_kernels.block_gemm.mosaic_gpu import TuningConfig
from pallas_kernels.device import B200, B300, H200, RTX5090
from pallas_kernels.moe.api import ExpertForm, ExpertWeights, moe
from pallas_kernels.moe.specs import SPECS
from pallas_kernels.weight_tiles.codecs import Mxfp8
from pallas_kernels.weight_tiles.mma_sm100 import Tcgen05
from peagle_jax.models.quantized_activations import _rounded, _widened
from tests.kernels import block_scaled
from tests.kernels.compiled import referenced
from tests.kernels.test_moe_mosaic import by_definition, logits_of, mix

NAN, ONE = 255, 127
E4M3 = jnp.float8_e4m3fn

quantize = jax.jit(mxfp8.quantize)
rounded = jax.jit(mxfp8.rounded)


@pytest.fixture
def blackwell(monkeypatch):
    """The kernels of sm_100, interpreted."""
    block_scaled.install(monkeypatch)
    monkeypatch.setattr(dispatch, "_default_device", lambda: B200)


def rows_of(R: int, K: int) -> jax.Array:
    """bfloat16 rows whose groups differ in size by orders of magnitude."""
    rng = np.random.default_rng(R + K)
    size = np.repeat(np.exp(2 * rng.normal(size=(R, -(-K // 32)))), 32, axis=1)[:, :K]
    return jnp.asarray(size * rng.normal(size=(R, K)), jnp.bfloat16)


@functools.cache
def weight_of(*shape: int) -> tuple[jax.Array, jax.Array]:
    values, codes = mxfp8.quantize(jax.random.normal(jax.random.key(shape[-1]), shape))
    return values, mxfp8.pack(codes)


def by_groups(x, values, scale) -> np.ndarray:
    """The definition in float64: one sum for each group of 32 columns, scaled, in ascending order."""
    x8, x_codes = (np.asarray(part, np.float64) for part in quantize(x))
    w8, w_codes = (np.asarray(part, np.float64) for part in (values, unpacked(scale, values)))
    total = 0.0
    for group in range(x_codes.shape[1]):
        columns = slice(32 * group, 32 * (group + 1))
        exponents = x_codes[:, group, None] + w_codes[None, :, group] - 2 * ONE
        total = total + np.exp2(exponents) * (x8[:, columns] @ w8[:, columns].T)
    return total


def unpacked(scale, values) -> jax.Array:
    return mxfp8.unpack(scale, *values.shape[-2:])


magnitudes = st.floats(2.0**-100, 2.0**100, width=32) | st.just(0.0)


@given(st.lists(magnitudes, min_size=1, max_size=32), st.integers(0, 31), st.integers(0, 31))
@settings(max_examples=60, deadline=None)  # the first example compiles
def test_a_group_is_scaled_by_the_power_of_two_of_its_largest_number(sizes, first, second):
    """And no number is off by more than half a step of e4m3, but those above 448, which become 448."""
    x = np.zeros((2, 64), np.float32)
    x[0, : len(sizes)] = sizes
    x[0, [first, second]] *= -1
    x[1, 32:] = x[0, :32]
    values, codes = map(np.asarray, quantize(jnp.asarray(x)))
    largest = np.abs(x).reshape(2, 2, 32).max(-1)
    exponent = np.floor(np.log2(largest, where=largest > 0, out=np.zeros_like(largest, float))) - 8
    assert np.array_equal(codes, np.where(largest > 0, exponent, 0) + ONE)
    scale = np.repeat(np.exp2(codes.astype(np.float64) - ONE), 32, axis=-1)
    wanted = np.clip(x, -448 * scale, 448 * scale)
    error = np.abs(values.astype(np.float64) * scale - wanted)
    assert (error <= np.maximum(np.abs(wanted) * 2.0**-4, scale * 2.0**-10)).all()
    assert np.array_equal(rounded(jnp.asarray(x)), (values.astype(np.float64) * scale))


def test_a_group_that_is_not_finite_is_not_a_number():
    x = jnp.ones((1, 96)).at[0, 3].set(jnp.inf).at[0, 40].set(jnp.nan)
    assert np.asarray(quantize(x)[1]).tolist() == [[NAN, NAN, ONE - 8]]
    assert np.isnan(rounded(x)).tolist() == [[True] * 64 + [False] * 32]


def test_a_rows_numbers_depend_on_the_row_only():
    x = rows_of(9, 200)
    for row in range(9):
        for alone, among in zip(quantize(x[row : row + 1]), quantize(x), strict=True):
            assert np.array_equal(alone[0].view(jnp.uint8), among[row].view(jnp.uint8))


@pytest.mark.parametrize(("rows", "columns", "tile"), [(300, 700, 128), (70, 256, 64), (9, 96, 8)])
def test_scales_lie_where_the_tensor_cores_read_them(rows, columns, tile):
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 250, (2, rows, -(-columns // 32)), np.uint8)
    packed = mxfp8.pack(jnp.asarray(codes), tile)
    shape = mxfp8.tiles(rows, columns, tile)
    assert packed.shape == (2, *shape)
    for e, t, step in itertools.product(range(2), *map(range, shape[:2])):
        block = block_scaled.scales_of(np.asarray(packed[e, t, step]))
        part = codes[e, t * tile : min((t + 1) * tile, rows), 4 * step : 4 * step + 4]
        assert np.array_equal(block[: part.shape[0], : part.shape[1]], part)
        assert (block[part.shape[0] :] == ONE).all()
        assert (block[:, part.shape[1] :] == ONE).all()
    assert np.array_equal(mxfp8.unpack(packed, rows, columns, tile), codes)


def test_a_weight_says_its_format_and_its_numbers():
    values, scale = weight_of(160, 384)
    assert formats.kind(values, scale) == "mxfp8"
    assert formats.logical_shape(values, scale) == (160, 384)
    wide = np.asarray(values, np.float64) * np.repeat(
        np.exp2(np.asarray(unpacked(scale, values), np.float64) - ONE), 32, axis=1
    )
    assert np.array_equal(formats.dequantize(values, scale, jnp.float32), wide)
    assert formats.takes(values, scale, 384)
    assert formats.takes(values, scale, 300)
    assert not formats.takes(values, scale, 256)
    assert rounding("bf16", values, scale) is mxfp8.rounded
    with pytest.raises(ValueError, match=r"must be \(2, 3, 32, 16\)"):
        formats.kind(values, scale[:1])
    with pytest.raises(ValueError, match="mxfp8 a uint8 one"):
        formats.kind(values, scale.astype(jnp.bfloat16))


def test_an_mxfp4_weight_becomes_mxfp8_exactly():
    """All 16 numbers with all scales but the smallest, which float32 has as subnormal numbers, and NaN."""
    codes = np.arange(1, 256, dtype=np.uint8)[:, None]
    values = np.tile(np.arange(256, dtype=np.uint8)[:16] * 17, (255, 1))
    mxfp4 = jnp.asarray(values), jnp.asarray(codes)
    made = _widened(*mxfp4)
    assert made[0].shape == (255, 128)  # 32 columns, and zeros up to a whole tile
    found = formats.dequantize(*made, jnp.float32)[:, :32]
    normal = slice(1, None)  # a CPU flushes half of the smallest normal number
    assert np.array_equal(found[normal], formats.dequantize(*mxfp4, jnp.float32)[normal], True)


@pytest.mark.parametrize("scales", [(2, 2), (200, 1), (200, 2)])
def test_an_fp8_weight_is_rounded_once_more(scales):
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.normal(size=(200, 160)), E4M3)
    scale = jnp.asarray(np.exp(rng.normal(size=scales)), jnp.float32)
    made = _rounded(values, scale)
    assert formats.kind(*made) == "mxfp8"
    assert made[0].shape == (200, 256)
    wide = np.asarray(formats.dequantize(values, scale, jnp.float32))
    found = np.asarray(formats.dequantize(*made, jnp.float32))
    assert (found[:, 160:] == 0).all()
    largest = np.repeat(np.abs(wide).reshape(200, 5, 32).max(-1), 32, axis=1)
    error = np.abs(found[:, :160] - wide)
    # Half a step of e4m3, an eighth where the largest number of a group is above 448, and of small numbers 2^-10 of
    # a scale, which is at least 2^-9 of the largest.
    assert (error <= np.maximum(np.abs(wide) / 8, largest * 2.0**-18)).all()
    below = np.abs(wide) <= largest * 448 / 512
    assert (error[below] <= np.maximum(np.abs(wide) / 16, largest * 2.0**-18)[below]).all()


@pytest.mark.sampled(1, slow=0)
@pytest.mark.parametrize(("R", "N", "K"), [(3, 700, 160), (9, 96, 384)])
def test_the_reference_computes_the_definition(R, N, K):
    weight, x = weight_of(N, -(-K // 128) * 128), rows_of(R, K)
    wide = jnp.pad(x, ((0, 0), (0, -K % 128)))
    wanted = by_groups(wide, *weight)
    close = functools.partial(np.testing.assert_allclose, atol=2e-6 * np.abs(wanted).max())
    close(referenced(linear, x, weight[0], scale=weight[1], out_dtype=jnp.float32), wanted)
    close(referenced(partial_products, x, weight[0], scale=weight[1])[0], wanted)


@pytest.mark.sampled(2, slow=0)
@pytest.mark.parametrize("activations", ["fp8", "mxfp8"])
@pytest.mark.parametrize("N", [256, 700])
def test_a_row_of_the_reference_has_the_same_bits_in_any_company(activations, N):
    values, scale = weight_of(N, 384)
    if activations == "fp8":
        scale = jnp.ones((N, 1))
    x = rows_of(33, 384).astype(jnp.float32)
    run = lambda x: np.asarray(
        referenced(linear, x, values, scale=scale, activations="fp8", out_dtype=jnp.float32)
    )
    whole = run(x)
    for first, shape in ((0, (1, 1)), (7, (1,)), (3, (8, 1)), (16, (2, 8)), (30, (3,))):
        size = int(np.prod(shape))
        part = run(x[first : first + size].reshape(*shape, 384))
        assert np.array_equal(part.reshape(size, N), whole[first : first + size])


@pytest.mark.sampled(1, slow=2)
@pytest.mark.usefixtures("blackwell", "race_free")
@pytest.mark.parametrize(
    ("R", "N", "K"), [(8, 128, 256), (21, 192, 384), (70, 320, 640), (5, 320, 2048)]
)
def test_the_kernel_computes_the_definition(R, N, K):
    """The last with chunks of K whose steps run past it."""
    x, (values, scale) = rows_of(R, K), weight_of(N, K)
    found = linear(x, values, scale=scale, out_dtype=jnp.float32, implementation="mosaic_gpu")
    wanted = by_groups(x, values, scale)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.usefixtures("blackwell", "race_free")
def test_chunks_of_k_add_the_same_with_and_without_a_split():
    x, (values, scale) = rows_of(8, 640), weight_of(128, 640)
    launch = dispatch.resolve("block_gemm", "mosaic_gpu", chips=MXFP8_CHIPS)
    x8, x_scale = mxfp8.operand(x, 8)
    run = lambda split: mosaic_gpu.product(
        x8, values, scale, TuningConfig(8, 2, split, stages=2), launch, x_scale
    )
    parts, whole = run(True), run(False)
    assert (parts.shape[0], whole.shape[0]) == (2, 1)
    assert np.array_equal(add_in_order(parts), whole[0])


def experts(E: int = 16, D: int = 128, F: int = 160) -> tuple[ExpertWeights, ExpertWeights]:
    """Down has zeros from column F to 256."""
    down, scale = weight_of(E, D, 256)
    bias = jax.random.normal(jax.random.key(5), (E, 2, F)).astype(jnp.bfloat16)
    return (
        ExpertWeights(*weight_of(E, 2, F, D), bias),
        ExpertWeights(down.at[..., F:].set(0), scale),
    )


@pytest.mark.sampled(1, slow=1)
@pytest.mark.usefixtures("blackwell", "race_free")
@pytest.mark.parametrize("R", [5, 70, 12, 21])
def test_experts_compute_as_the_reference(R):
    """Items that share the rows of x, and sorted ones."""
    options = dict(form=ExpertForm(1.5))
    x, logits = rows_of(R, 128) / 16, logits_of(R, 16)
    wanted = mix(x, logits, experts(), "reference", **options)
    found = mix(x, logits, experts(), **options)
    # Some inner activations round to another bfloat16, and then to another e4m3.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.03 * np.abs(wanted).max())


def test_experts_quantise_the_rows_of_both_products():
    R, (gate_up, down) = 4, experts()
    shares, ids = by_definition(logits_of(R, 16), None, 1, True)
    x = rows_of(R, 128).astype(jnp.float32) / 16
    found = moe(x, jnp.asarray(ids), jnp.asarray(shares), gate_up, down, implementation="reference")
    for row in range(R):
        e = int(ids[row, 0])
        gate, up = (
            by_groups(x[row : row + 1], gate_up.values[e, part], gate_up.scale[e, part])
            + np.asarray(gate_up.bias[e, part], np.float64)
            for part in range(2)
        )
        inner = jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.float32)
        inner = jnp.pad(inner, ((0, 0), (0, 96)))
        wanted = by_groups(inner, down.values[e], down.scale[e])[0]
        # A few inner activations round to the other neighbour.
        np.testing.assert_allclose(found[row], wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("chip", [H200, RTX5090])
def test_other_chips_refuse_the_kernels_by_name(monkeypatch, chip):
    monkeypatch.setattr(dispatch, "_default_device", lambda: chip)
    x, (values, scale) = rows_of(8, 256), weight_of(128, 256)
    with pytest.raises(NotImplementedError, match=rf"{chip.name}.*its kernel is for sm_100"):
        linear(x, values, scale=scale, implementation="mosaic_gpu")
    ids = jnp.zeros((8, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=rf"{chip.name}.*its kernel is for sm_100"):
        moe(rows_of(8, 128), ids, jnp.ones((8, 1)), *experts(), implementation="mosaic_gpu")


@pytest.mark.parametrize("chip", [B200, B300])
def test_blackwell_takes_the_kernels_by_itself(monkeypatch, chip):
    monkeypatch.setattr(dispatch, "_default_device", lambda: chip)
    taken = []
    monkeypatch.setattr(mosaic_gpu, "product", lambda x, values, *_: taken.append(x) or x[None])
    x, (values, scale) = rows_of(8, 256), weight_of(256, 256)
    linear(x, values, scale=scale)
    assert [rows.dtype for rows in taken] == [E4M3]


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.form == "mxfp8"])
def test_tensor_memory_has_room_for_four_or_two_blocks(name):
    """Sums, and scales of weights and x, by Mosaic's count of columns; a block takes a power of two of 512."""
    from pallas_kernels.moe.specs import _config

    with dispatch.assume(B200):
        tokens = _config(SPECS[name]).tokens
    parts = 2 if SPECS[name].kernel == "gate_up" else 1
    scratch = Tcgen05().scratch(Mxfp8(), parts, tokens)
    of_scales = block_scaled.columns_of_scales(scratch["scales_tmem"])
    of_sums = scratch["sums_tmem"].layout.cols_in_shape(scratch["sums_tmem"].shape, 32)
    assert (of_sums, of_scales) == (parts * tokens, 4 * (parts + 1))
    assert of_sums + of_scales <= (256 if tokens == 64 and parts == 2 else 128)
