"""Norms and residual sums: the kernel in Mosaic's interpreter against the reference."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_tiles
from pallas_kernels.block_gemm.api import add_in_order, linear
from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm

pytestmark = pytest.mark.sampled(1)

EPS = 1e-5


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def operands(S: int, *shape: int, dtype=jnp.bfloat16) -> tuple[jax.Array, ...]:
    """h, delta [S, ...], scale [D], weights [S, rows of h]"""
    weights = np.exp(normal(3, S, math.prod(shape[:-1])))
    weights = jnp.asarray(weights / weights.sum(0))
    return (
        normal(0, *shape, dtype=dtype),
        normal(1, S, *shape),
        normal(2, shape[-1], dtype=dtype),
        weights,
    )


def in_buffer(delta: jax.Array, weights: jax.Array, dtype=jnp.float32, order: int = 7) -> dict:
    """Parts as rows of one buffer, in an order of no meaning, for `add_rms_norm`."""
    S, R = weights.shape
    place = np.random.default_rng(order).permutation(S * R)
    buffer = np.zeros((S * R, delta.shape[-1]), np.float32)
    buffer[place] = np.asarray(delta, np.float32).reshape(S * R, -1)
    rows = jnp.asarray(place.reshape(S, R), jnp.int32)
    return dict(delta=jnp.asarray(buffer, dtype), routed=(weights, rows))


def exact_norm(x, scale, eps: float = EPS) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    mean = np.mean(wide**2, axis=-1, keepdims=True)
    return wide / np.sqrt(mean + eps) * np.asarray(scale, np.float64)


def assert_close(found: jax.Array, wanted: np.ndarray, step: float):
    """To `step` of the element, and to the rounding of 33 float32 terms that cancel."""
    error = np.abs(np.asarray(found, np.float64) - wanted)
    assert (error <= step * np.abs(wanted) + 1e-5).all(), error.max()


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize(("dtype", "step"), [(jnp.bfloat16, 2**-8), (jnp.float32, 2**-20)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("S", [1, 3, 32])
def test_the_reference_computes_as_in_float64(S, weighted, dtype, step):
    h, delta, scale, weights = operands(S, 2, 5, 96, dtype=dtype)
    share = np.asarray(weights, np.float64) if weighted else np.ones((S, 10))
    if weighted:  # experts' results are as the activations, parts of a product are float32
        delta = delta.astype(dtype)
    total = np.einsum("sbtd,sbt->btd", np.asarray(delta, np.float64), share.reshape(S, 2, 5))
    parts = in_buffer(delta, weights, dtype) if weighted else dict(delta=delta)
    added, normed = definition(h, scale=scale, **parts)
    assert added.dtype == normed.dtype == dtype
    assert_close(added, np.asarray(h, np.float64) + total, step)
    assert_close(normed, exact_norm(added, scale), step)  # of the sum as rounded


def test_parts_are_added_by_ascending_number():
    """(1e8 + 1) - 1e8 + 1 is 1 in float32, and 2 in any order that cancels first."""
    parts = jnp.array([1e8, 1.0, -1e8, 1.0])[:, None, None] * jnp.ones((4, 1, 64))
    zeros = jnp.zeros((1, 64))
    for implementation in ("reference", None):
        added, _ = add_rms_norm(zeros, parts, jnp.ones(64), eps=EPS, implementation=implementation)
        assert (np.asarray(added) == 1).all()


@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize(("S", "D"), [(1, 320), (4, 2880)])
def test_a_bias_is_added_to_the_sum_of_the_parts(S, D, implementation):
    """As if a layer added it before the residual sum: the same bits."""
    h, delta, scale, _ = operands(S, 5, D, dtype=jnp.bfloat16)
    bias = jnp.asarray(np.random.default_rng(S).normal(size=D), jnp.bfloat16)
    given = dict(eps=EPS, implementation=implementation)
    total = add_in_order(delta) + bias.astype(jnp.float32)
    wanted = jax.jit(lambda *args: add_rms_norm(*args, **given))(h, total, scale)
    found = jax.jit(lambda *args, bias: add_rms_norm(*args, bias=bias, **given))(
        h, delta, scale, bias=bias
    )
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other)


def rest(D: int, *, factor: bool, dtype=jnp.bfloat16) -> dict:
    """An inner norm, whose eps is not that of the outer one, and a factor."""
    scale = 1 + 0.3 * normal(4, D)
    given = dict(inner=(scale.astype(dtype), 0.3))
    return given | dict(factor=jnp.array([0.77], dtype)) if factor else given


def in_steps(h, total, scale, inner, factor=None, implementation=None) -> tuple:
    """(sum, norm) of `add_rms_norm` from the sum of the parts, operation by operation."""
    norm = functools.partial(rms_norm, implementation=implementation)
    h = h + norm(total.astype(h.dtype), inner[0], eps=inner[1])
    h = h if factor is None else h * factor
    return h, norm(h, scale, eps=EPS)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("S", [1, 3])
def test_an_inner_norm_and_a_factor_round_as_steps_do(S, factor, dtype):
    """The bits of a norm, an addition, a product and a norm that are computed one by one."""
    h, delta, scale, _ = operands(S, 2, 5, 96, dtype=dtype)
    given = rest(96, factor=factor, dtype=dtype)
    wanted = in_steps(h, add_in_order(delta), scale, **given)
    found = add_rms_norm(h, delta, scale, eps=EPS, **given)
    compiled = jax.jit(lambda *args: add_rms_norm(*args, eps=EPS, **given))(h, delta, scale)
    for one, other, step in zip(found, compiled, wanted, strict=True):
        assert one.dtype == dtype
        assert np.array_equal(one, step)
        if dtype == jnp.bfloat16:  # XLA may order a sum of float32 squares as it likes
            assert np.array_equal(other, step)
    exact = np.asarray(h, np.float64) + exact_norm(add_in_order(delta), *given["inner"])
    exact *= float(given["factor"][0]) if factor else 1
    atol = 2**-5 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(found[0], np.float64), exact, atol=atol)


kernel = jax.jit(
    functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu"),
)
definition = jax.jit(functools.partial(add_rms_norm, eps=EPS, implementation="reference"))


def assert_same(found, wanted, dtype):
    """The sums are the same bits; norms may differ in the order of their sum of squares."""
    step = 2**-7 if dtype == jnp.bfloat16 else 2**-20
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == dtype
    assert np.array_equal(found[0], wanted[0])
    assert_close(found[-1], np.asarray(wanted[-1], np.float64), step)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize(
    ("D", "S", "dtype"),
    [
        (256, 1, jnp.bfloat16),  # one strip
        (320, 4, jnp.bfloat16),  # two that overlap
        (1024, 2, jnp.bfloat16),  # two warpgroups
        (1344, 1, jnp.float32),  # too ragged for more than one
        (2880, 2, jnp.bfloat16),  # three warpgroups of two strips, the last two overlap
        (2560, 1, jnp.bfloat16),  # a warpgroup with a strip too many
    ],
)
@pytest.mark.usefixtures("race_free")
def test_the_kernel_is_the_reference(D, S, dtype):
    h, delta, scale, _ = operands(S, 2, D, dtype=dtype)
    assert_same(kernel(h, delta, scale), definition(h, delta, scale), dtype)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize(
    ("D", "S", "dtype"),
    [
        (256, 1, jnp.bfloat16),  # one warpgroup
        (320, 4, jnp.float32),  # one, whose two strips overlap
        (1024, 3, jnp.bfloat16),  # two
        (2880, 2, jnp.bfloat16),  # three of two strips, the last two overlap
        (5376, 3, jnp.bfloat16),  # Gemma's: four of three strips, the last two overlap
    ],
)
@pytest.mark.usefixtures("race_free")
def test_the_kernel_norms_the_sum_of_the_parts(D, S, dtype, factor):
    """The two norms of a row exchange their squares one after the other."""
    h, delta, scale, _ = operands(S, 2, D, dtype=dtype)
    given = rest(D, factor=factor, dtype=dtype)
    run = jax.jit(functools.partial(add_rms_norm, eps=EPS, implementation="mosaic_gpu", **given))
    delta, bias = 30 * delta, normal(5, D, dtype=dtype)  # the norms' squares are far apart
    total = add_in_order(delta) + bias.astype(jnp.float32)
    found = run(h, delta, scale, bias=bias)
    wanted = in_steps(h, total, scale, **given, implementation="mosaic_gpu")
    for one, step, close in zip(found, wanted, in_steps(h, total, scale, **given), strict=True):
        assert one.dtype == dtype
        assert np.array_equal(one, step)
        assert (one == close).mean() > 0.9 or dtype == jnp.float32
        np.testing.assert_allclose(one.astype(float), close.astype(float), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("D", [320, 1024])
@pytest.mark.usefixtures("race_free")
def test_the_kernel_adds_weighted_rows_of_a_buffer(D, dtype):
    h, delta, scale, weights = operands(3, 2, 2, D)
    buffer = in_buffer(delta, weights, dtype)
    assert_same(kernel(h, scale=scale, **buffer), definition(h, scale=scale, **buffer), h.dtype)


@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_the_norm_is_rounded_once_to_each_dtype(implementation):
    h, delta, scale, _ = operands(3, 5, 320)
    how = dict(eps=EPS, implementation=implementation)
    added, *normed = add_rms_norm(
        h, delta, scale, out_dtypes=(jnp.float16, jnp.bfloat16, jnp.float32), **how
    )
    assert [x.dtype for x in normed] == [jnp.float16, jnp.bfloat16, jnp.float32]
    exact = exact_norm(added, scale)
    for x, step in zip(normed, (2**-11, 2**-8, 2**-20), strict=True):
        assert_close(x, exact, step)  # rounded to bfloat16 before, a number is 2**-9 away
        assert np.array_equal(x, normed[-1].astype(x.dtype))
    assert_same((added, normed[1]), add_rms_norm(h, delta, scale, **how), h.dtype)
    alone = rms_norm(added, scale, out_dtype=jnp.float16, **how)
    assert np.array_equal(alone, normed[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_float16_rows_saturate(implementation):
    """One massive channel is normed to sqrt(D); a product with it stays finite."""
    D, how = 2048, dict(eps=EPS, implementation=implementation)
    scale = jnp.full(D, 1500, jnp.bfloat16)
    h = normal(0, 4, D, dtype=jnp.bfloat16) / 64
    h = h.at[0, 7].set(30000).at[1, 700].set(-30000).at[2, 5].set(jnp.nan)
    norm = lambda *dtypes: add_rms_norm(h, jnp.zeros((1, 4, D)), scale, out_dtypes=dtypes, **how)
    half, wide, same = norm(jnp.float16, jnp.float32, jnp.bfloat16)[1:]
    assert wide[0, 7] > 65504 < same[0, 7]
    assert (half[0, 7], half[1, 700]) == (65504, -65504)
    assert np.isnan(half[2]).all()
    assert np.array_equal(rms_norm(h, scale, out_dtype=jnp.float16, **how), half, equal_nan=True)
    rest = jnp.abs(wide) < 65504
    assert np.array_equal(half[rest], wide[rest].astype(jnp.float16))
    weight = fp8_tiles.arrange(normal(1, 64, D).astype(jnp.float8_e4m3fn))
    product = linear(half, weight, scale=jnp.ones((1, D // 128)), implementation=implementation)
    assert np.isfinite(product).all(1).tolist() == [True, True, False, True]


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_a_row_has_the_same_bits_in_any_company(implementation, dtype, normed):
    how = rest(320, factor=True) if normed else {}
    run = jax.jit(functools.partial(add_rms_norm, eps=EPS, implementation=implementation, **how))
    h, delta, scale, weights = operands(2, 5, 320)
    whole = run(h, scale=scale, **in_buffer(delta, weights, dtype))
    for part in (slice(0, 1), slice(2, 5)):
        alone = run(h[part], scale=scale, **in_buffer(delta[:, part], weights[:, part], dtype, 8))
        for one, all_rows in zip(alone, whole, strict=True):
            assert np.array_equal(one, all_rows[part])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(delta=jnp.zeros((4, 128))), "delta.shape="),
        (dict(delta=jnp.zeros((33, 4, 64))), "at most 32"),
        (dict(delta=jnp.zeros((0, 4, 64))), "0 parts"),
        (dict(scale=jnp.zeros(63)), "scale.shape="),
        (dict(bias=jnp.zeros(4)), "bias.shape="),
        (dict(inner=(jnp.zeros(4), EPS)), "inner scale.shape="),
        (dict(factor=jnp.zeros(64)), "factor.shape="),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    fits = dict(h=jnp.zeros((4, 64)), delta=jnp.zeros((2, 4, 64)), scale=jnp.zeros(64))
    with pytest.raises(ValueError, match=said):
        add_rms_norm(**fits | change, eps=EPS)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((4, 128), jnp.bfloat16, "128 columns"),
        ((4, 300), jnp.bfloat16, "300 columns"),
        ((4, 8256), jnp.bfloat16, "8256 columns"),
        ((4, 256), jnp.float16, "float16"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(shape, dtype, why):
    x = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=why):
        rms_norm(x, jnp.ones(shape[-1]), eps=EPS, implementation="mosaic_gpu")
    assert rms_norm(x, jnp.ones(shape[-1]), eps=EPS).shape == shape


def test_rows_must_fit():
    h, delta, scale, weights = operands(3, 5, 320)
    fits = in_buffer(delta, weights)
    rows = fits["routed"][1]
    for bad, said in (
        (dict(routed=(weights[:2], rows)), "weights of their shape"),
        (dict(routed=(weights.astype(jnp.bfloat16), rows)), "float32 weights"),
        (dict(routed=(weights, rows[:, :4])), "at least 5 rows"),
        (dict(routed=(weights, rows.astype(jnp.float32))), "int32"),
        (dict(delta=delta), "buffer"),
        (dict(bias=scale), "a bias is for parts without rows"),
    ):
        with pytest.raises(ValueError, match=said):
            add_rms_norm(h, scale=scale, eps=EPS, **fits | bad)
