"""Routing and experts against float64; a row's bits do not depend on the rows beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.moe.api import Choice, Experts, mixture
from pallas_kernels.moe.reference import ExpertWeights
from peagle_jax.models.quant import quantize_fp8
from tests.kernels.experts import by_hand, moe, route

pytestmark = pytest.mark.sampled(1)

FORMATS = ("plain", "fp8", "mxfp4")
run = jax.jit(moe, static_argnames="limit")
choose = jax.jit(route, static_argnames=("top_k", "normalize"))


def projection(form: str, shape: tuple[int, ...], *, bias: bool, seed: int) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    bias = jnp.asarray(rng.normal(size=shape[:-1]), jnp.float32) if bias else None
    if form == "mxfp4":
        values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
        scale = rng.integers(122, 126, (*shape[:-1], shape[-1] // 32), np.uint8)
        return ExpertWeights(jnp.asarray(values), jnp.asarray(scale), bias)
    weight = (rng.normal(size=shape) / 4).astype(np.float32)
    if form == "fp8":
        return ExpertWeights(*map(jnp.asarray, quantize_fp8(weight)), bias)
    return ExpertWeights(jnp.asarray(weight), None, bias)


def experts(form: str, *, E=6, F=160, D=32, bias=False) -> tuple[ExpertWeights, ExpertWeights]:
    gate_up = projection(form, (E, 2, F, D), bias=bias, seed=0)
    return gate_up, projection(form, (E, D, F), bias=bias, seed=1)


def routed(R: int, E: int = 6, k: int = 2) -> tuple[jax.Array, jax.Array]:
    """ids [R, k], weights [R, k]."""
    logits = jax.random.normal(jax.random.key(R), (R, E)) * 2
    weights, ids = choose(logits, k, normalize=True)
    return ids, weights


def rows(R: int, D: int = 32, dtype=jnp.float32) -> jax.Array:
    return (2 * jax.random.normal(jax.random.key(7), (R, D))).astype(dtype)


@pytest.mark.sampled(1, slow=3)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("form", FORMATS)
def test_experts_compute_as_in_float64(form, limit, bias):
    """The limit is low enough to clamp gates and ups."""
    weights = experts(form, bias=bias)
    x, routing = rows(5), routed(5)
    wanted = by_hand(x, *routing, *weights, limit)
    found = run(x, *routing, *weights, limit=limit)
    assert np.allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("dtype", "wanted"), [(jnp.bfloat16, 1), (jnp.float32, 1.75)])
@pytest.mark.parametrize("R", [1, 9])
def test_an_experts_result_is_rounded_and_the_sum_is_not(R, dtype, wanted):
    """Results 256.75, 1 and -256, of which bfloat16 has 256, 1 and -256; it has no 257."""
    gate_up = ExpertWeights(jnp.ones((3, 2, 1, 1)))
    down = ExpertWeights(jnp.ones((3, 1, 1)), bias=jnp.array([[256.75], [1.0], [-256.0]]))
    x, ids = jnp.zeros((R, 1), dtype), jnp.broadcast_to(jnp.arange(3), (R, 3))
    found = run(x, ids, jnp.ones((R, 3)), gate_up, down)
    assert (np.asarray(found, np.float32) == wanted).all()


def test_gpt_oss_activation_clamps_gate_from_above_only():
    """Two experts with D = F = 1: gate is 2 x, up is -3 x, down is 1, limit 4."""
    gate_up = ExpertWeights(jnp.array([2.0, -3.0]).reshape(1, 2, 1, 1).repeat(2, axis=0))
    down = ExpertWeights(jnp.ones((2, 1, 1)), bias=jnp.array([[0.0], [10.0]]))
    x, ids = jnp.array([[1.0], [3.0], [-3.0]]), jnp.array([[0], [1], [0]], jnp.int32)
    found = run(x, ids, jnp.full((3, 1), 0.5), gate_up, down, limit=4.0)[:, 0]
    act = lambda gate, up: (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    wanted = [0.5 * act(2, -3), 0.5 * (act(4, -4) + 10), 0.5 * act(-6, 4)]
    assert np.allclose(found, wanted, rtol=1e-6)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize(("F", "D"), [(160, 32), (8, 16), (33, 7), (64, 1)])
def test_a_row_has_the_same_bits_in_any_company(F, D, limit):
    weights = experts("plain", F=F, D=D, bias=True)
    x, (ids, shares) = rows(32, D), routed(32)
    whole = np.asarray(run(x, ids, shares, *weights, limit=limit))
    for num_rows in (1, 5, 8, 9):
        for start in (0, 3, 32 - num_rows):
            part = slice(start, start + num_rows)
            alone = run(x[part], ids[part], shares[part], *weights, limit=limit)
            assert np.array_equal(alone, whole[part]), (num_rows, start)


def test_an_expert_touches_no_row_that_did_not_choose_it():
    """One full of NaN reaches its own row and no other; one that no row chose reaches none."""
    weights, x = experts("plain"), rows(3)
    ids = jnp.array([[0, 1], [2, 3], [1, 3]], jnp.int32)
    shares = jnp.full((3, 2), 0.5)
    clean = np.asarray(run(x, ids, shares, *weights))
    poison = lambda e: weights[0]._replace(values=weights[0].values.at[e].set(jnp.nan))
    assert np.array_equal(run(x, ids, shares, poison(5), weights[1]), clean)
    found = np.asarray(run(x, ids, shares, poison(2), weights[1]))
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_routing_takes_the_largest_and_ties_go_to_the_lower_id(num_cases):
    """Logits are few whole numbers, so that most rows have ties."""

    @settings(deadline=None, max_examples=num_cases("rows routed to experts", 20))
    @given(R=st.integers(1, 20), E=st.integers(1, 40), normalize=st.booleans(), data=st.data())
    def check(R, E, normalize, data):
        k = data.draw(st.integers(1, min(E, 8)))
        logits = np.random.default_rng(R * E).integers(-3, 4, (R, E)).astype(np.float32)
        weights, ids = choose(jnp.asarray(logits), k, normalize=normalize)
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        powers = np.exp(logits.astype(np.float64))
        chosen = np.take_along_axis(powers, order, axis=-1)
        total = (chosen if normalize else powers).sum(-1, keepdims=True)
        assert (weights.dtype, ids.dtype) == (jnp.float32, jnp.int32)
        assert np.array_equal(ids, order)
        assert np.allclose(weights, chosen / total, rtol=1e-6)

    check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(x=rows(3, 31)), "gate_up is"),
        (dict(x=rows(4)), "rows of activations"),
        (dict(logits=jnp.zeros((3, 6), jnp.bfloat16)), "float32"),
        (dict(logits=jnp.zeros((3, 7))), "logits of 7 experts"),
        (dict(top_k=7), "between 1"),
        (dict(gate_up=ExpertWeights(jnp.zeros((6, 3, 160, 32)))), "gate_up is"),
        (dict(down=ExpertWeights(jnp.zeros((5, 32, 160)))), "down is"),
        (dict(gate_up=ExpertWeights(jnp.zeros((6, 2, 160, 32)), None, jnp.zeros(6))), "gate_up's"),
        (dict(down=ExpertWeights(jnp.zeros((6, 32, 160)), None, jnp.zeros((6, 160)))), "down's"),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_what_does_not_fit_is_refused(change, says, implementation):
    gate_up, down = experts("plain")
    call = dict(x=rows(3), logits=jnp.zeros((3, 6)), top_k=2, gate_up=gate_up, down=down) | change
    weights = Experts(call["gate_up"], call["down"])
    choice = Choice(call["top_k"], True)
    with pytest.raises(ValueError, match=says):
        mixture(call["x"], call["logits"], choice, weights, implementation=implementation)
