"""Products with quantised activations: definition, kernels, rows whose bits are their own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.activations import are_quantized, as_quantized, quantize
from pallas_kernels.block_gemm.api import add_in_order, linear, partial_products
from pallas_kernels.moe.reference import ExpertWeights
from pallas_kernels.quantize.mosaic_gpu import quantize as quantize_rows
from pallas_kernels.quantize.mosaic_gpu import spread_operand
from tests.kernels.compiled import dequantize, referenced
from tests.kernels.experts import moe

race_free = pytest.mark.usefixtures("race_free")
both_chips = pytest.mark.usefixtures("chip")
every_chip = pytest.mark.usefixtures("chip")
E4M3 = jnp.float8_e4m3fn


def rows_of(R: int, K: int, seed: int = 0) -> jax.Array:
    """bfloat16 [R, K] whose rows and groups differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.normal(size=(R, -(-K // 128))), 128, axis=1)[:, :K]
    size = np.exp(2 * rng.normal(size=(R, 1)) + 2 * groups)
    return jnp.asarray(size * rng.normal(size=(R, K)), jnp.bfloat16)


def weight_of(*shape: int, per_row: bool = False, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Values and scale of an fp8 weight."""
    *leading, N, K = shape
    rng = np.random.default_rng(seed)
    scales = (N, 1) if per_row else (-(-N // 128), -(-K // 128))
    scale = np.exp(rng.normal(size=(*leading, *scales))) / 32
    return jnp.asarray(rng.normal(size=shape), E4M3), jnp.asarray(scale, jnp.float32)


def launch() -> dispatch.Launch:
    return dispatch.resolve("quantize", "mosaic_gpu")


def test_a_group_is_divided_by_its_scale_and_rounded_to_e4m3():
    x = rows_of(5, 320).at[2, 128:256].set(0)
    found = quantize(x)
    assert found.values.dtype == E4M3
    assert found.values.shape == (5, 320)
    assert found.scale.shape == (3, 8)
    wide = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 64))).reshape(5, 3, 128)
    largest = np.abs(wide).max(-1)
    scale = np.where(largest == 0, np.float32(1), largest * np.float32(1 / 448))
    np.testing.assert_array_equal(found.scale.T[:5], scale)
    values = (wide / scale[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(5, -1)[:, :320]
    np.testing.assert_array_equal(np.asarray(found.values), values)
    far = np.abs(np.asarray(as_quantized(x)) - np.asarray(x, np.float32)).reshape(5, -1, 64).max(-1)
    assert (far <= np.repeat(largest, 2, axis=1)[:, :5] * 2.0**-4).all()


def definition(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales [R, groups] as numpy computes them: XLA for CPUs rounds to e4m3 twice."""
    groups = np.asarray(x, np.float32).reshape(x.shape[0], -1, 128)
    largest = np.abs(groups).max(-1)
    scale = np.where(largest == 0, np.float32(1), largest * np.float32(1 / 448))
    values = (groups / scale[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(x.shape), scale


@pytest.mark.sampled(2, slow=2)
@every_chip
@race_free
@pytest.mark.parametrize(("R", "K"), [(1, 1280), (3, 256), (8, 128), (21, 384)])
def test_the_kernel_quantises_as_defined(R, K):
    x = rows_of(R, K).at[0, 128:].set(0)
    values, scale = definition(x)
    found = quantize_rows(x, launch())
    assert found.scale.shape == (K // 128, -(-R // 8) * 8)
    np.testing.assert_array_equal(np.asarray(found.values), values)
    np.testing.assert_array_equal(found.scale.T[:R], scale)


@pytest.mark.sampled(1, slow=1)
@every_chip
@race_free
@pytest.mark.parametrize("K", [256, 1280])
def test_rows_are_quantised_on_the_way_to_their_slots(K):
    x = rows_of(5, K)
    values, scale = definition(x)
    slots = jax.random.permutation(jax.random.key(1), 16)[:10].reshape(2, 5).astype(jnp.int32)
    spread, spread_scale = spread_operand(x, slots, 16, True, launch())
    for copy in slots:
        np.testing.assert_array_equal(np.asarray(spread)[copy], values)
        np.testing.assert_array_equal(spread_scale.T[copy], scale)


@pytest.mark.parametrize(
    ("mode", "form", "wanted"),
    [
        ("bf16", "fp8", False),
        ("fp8", "fp8", True),
        ("fp8", "fp8_rows", True),
        ("fp8", "bf16", False),
        ("fp8", "mxfp4", False),
    ],
)
def test_only_fp8_weights_take_quantised_rows(mode, form, wanted):
    shaped = jax.ShapeDtypeStruct
    values, scale = {
        "bf16": (shaped((64, 128), jnp.bfloat16), None),
        "fp8": (shaped((64, 128), E4M3), shaped((1, 1), jnp.float32)),
        "fp8_rows": (shaped((64, 128), E4M3), shaped((64, 1), jnp.float32)),
        "mxfp4": (shaped((64, 64), jnp.uint8), shaped((64, 4), jnp.uint8)),
    }[form]
    assert are_quantized(mode, values, scale) is wanted


def test_other_names_of_activations_are_refused():
    values, scale = weight_of(64, 128)
    with pytest.raises(ValueError, match=r"activations='int8' must be one of \('bf16', 'fp8'\)"):
        linear(rows_of(1, 128), values, scale=scale, activations="int8")


def exact(x: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product of quantised rows in float64, and the sums of its terms' magnitudes."""
    weight = np.asarray(dequantize(values, scale, jnp.float32), np.float64)
    x = np.asarray(jax.jit(as_quantized)(x), np.float64)
    return x @ weight.T, np.abs(x) @ np.abs(weight).T


@every_chip
@race_free
@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize(
    ("R", "N", "K", "per_row"),
    [(3, 192, 384, False), (21, 320, 448, False), (70, 192, 384, True), (130, 128, 256, False)],
)
def test_a_product_of_quantised_rows_is_the_definition(R, N, K, per_row):
    x, (values, scale) = rows_of(R, K), weight_of(N, K, per_row=per_row)
    options = dict(scale=scale, activations="fp8", out_dtype=jnp.float32)
    wanted, size = exact(x, values, scale)
    found = linear(x, values, implementation="mosaic_gpu", **options)
    assert (np.abs(found - wanted) <= 1e-6 * size).all()
    reference = referenced(linear, x, values, **options)
    assert (np.abs(reference - wanted) <= 1e-5 * size).all()
    options["activations"] = "bf16"
    plain = referenced(linear, x, values, **options)
    assert (np.abs(plain - wanted) > 1e-3 * size).any()


@every_chip
@race_free
@pytest.mark.sampled(0, slow=2)
def test_a_quantised_row_does_not_depend_on_its_company():
    """Sums are exact here: the interpreter may add in another order for another number of rows."""
    keys = jax.random.split(jax.random.key(0), 4)
    whole = lambda key, shape, most: jax.random.randint(key, shape, -most, most + 1)
    x = whole(keys[0], (70, 384), 7).at[:, ::128].set(7)  # the scale of a group is a power of two
    x = (x * 2.0 ** jnp.repeat(whole(keys[1], (70, 3), 2), 128, axis=1)).astype(jnp.bfloat16)
    values = whole(keys[2], (320, 384), 4).astype(E4M3)
    scale = 2.0 ** whole(keys[3], (3, 3), 2)
    made = lambda x: partial_products(
        x, values, scale=scale, activations="fp8", implementation="mosaic_gpu"
    )
    many, one = made(x), made(x[66:67])
    np.testing.assert_array_equal(add_in_order(many)[66:67], add_in_order(one))


E, TOP_K, D, F = 4, 2, 128, 128


def experts_of(R: int):
    x = rows_of(R, D)
    keys = jax.random.split(jax.random.key(R), 2)
    ids = np.argsort(jax.random.normal(keys[0], (R, E)), axis=1)[:, :TOP_K]
    weights = jax.nn.softmax(jax.random.normal(keys[1], (R, TOP_K)))
    gate_up = ExpertWeights(*weight_of(E, 2, F, D))
    return (
        x,
        jnp.asarray(ids, jnp.int32),
        weights,
        gate_up,
        ExpertWeights(*weight_of(E, D, F, seed=1)),
    )


@pytest.mark.sampled(1, slow=2)
@both_chips
@race_free
@pytest.mark.parametrize("R", [3, 20])
def test_experts_of_quantised_rows_are_the_definition(R):
    args = experts_of(R)
    wanted = referenced(moe, *args, activations="fp8").astype(jnp.float32)
    found = moe(*args, activations="fp8", implementation="mosaic_gpu").astype(jnp.float32)
    # Rounding `inner` to bfloat16 and then to e4m3 may go the other way after another order of
    # sums.
    size = jnp.abs(wanted).max(1, keepdims=True)
    assert (jnp.abs(found - wanted) <= 2**-5 * size).all()
    assert float(jnp.abs(found - wanted).mean()) <= 2**-9 * float(jnp.abs(wanted).mean())
    plain = referenced(moe, *args).astype(jnp.float32)
    assert float(jnp.abs(plain - wanted).mean()) >= 2**-8 * float(jnp.abs(wanted).mean())
