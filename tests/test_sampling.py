"""Probabilities against plain NumPy, draws against their weights, keys against each other."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from peagle_jax.method.sampling import (
    accept_uniforms,
    cutoffs,
    draft_keys,
    emit_keys,
    probabilities,
    probability_of,
    request_keys,
    sample_rows,
)
from tests.request_params import request_params
from tests.test_sampling_filters import definition

V = 11


def reference(logits, temperature, *filters) -> np.ndarray:
    """One row: the likeliest token, or the probabilities among those that are kept."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    kept, probs = definition(logits, temperature, *filters)
    return np.where(kept, probs, 0) / probs[kept].sum()


COMBINATIONS = list(
    itertools.product(
        (0.0, 0.6, 1.0, 2.5), (0, 1, 3, V, 50), (1.0, 0.83, 0.31, 1e-6, 1e-50), (0.0, 0.17)
    )
)


@jax.jit
def jitted(logits, temperature, *filters):
    return probabilities(logits, temperature, cutoffs(logits, temperature, *filters))


@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_probabilities_are_those_of_plain_numpy(kind):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (len(COMBINATIONS), V)).astype(np.float32)
    if kind == "ties":  # four values in eleven places
        logits = rng.integers(0, 4, logits.shape).astype(np.float32)
    temperature, top_k, top_p, min_p = (np.array(x) for x in zip(*COMBINATIONS, strict=True))
    got = jitted(logits, temperature.astype(np.float32), top_k, top_p.astype(np.float32), min_p)
    want = [reference(row, *combo) for row, combo in zip(logits, COMBINATIONS, strict=True)]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_rows_of_several_positions_take_their_requests_parameters():
    """Logits [B, T, V] with parameters [B, 1], as the verification calls it."""
    logits = np.random.default_rng(1).normal(0, 2, (3, 2, V)).astype(np.float32)
    params = ((0.0, 0, 1.0, 0.0), (1.3, 2, 1.0, 0.0), (0.7, 0, 0.5, 0.2))
    columns = [np.array(x)[:, None] for x in zip(*params, strict=True)]
    got = jitted(logits, *columns)
    want = [[reference(row, *params[b]) for row in logits[b]] for b in range(3)]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_probability_of_one_token_is_that_among_all():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (len(COMBINATIONS), V)).astype(np.float32)
    tokens = np.argsort(-logits)[np.arange(len(logits)), rng.integers(0, 3, len(logits))]
    columns = [np.array(x) for x in zip(*COMBINATIONS, strict=True)]
    want = np.asarray(jitted(logits, *columns))[np.arange(len(logits)), tokens]
    got = probability_of(logits, tokens.astype(np.int32), columns[0], cutoffs(logits, *columns))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert (want == 0).any()
    assert (want > 0.1).any()


def test_the_token_at_the_cutoff_has_its_probability_at_every_temperature():
    """Divided by some temperatures its scaled logit would round to below the cutoff."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 3, (500, 40)).astype(np.float32)
    temperature = np.exp(rng.normal(0, 0.5, 500)).astype(np.float32)
    third = np.argsort(-logits)[:, 2].astype(np.int32)
    rule = (temperature, np.full(500, 3), np.ones(500, np.float32), np.zeros(500, np.float32))
    want = np.asarray(jitted(logits, *rule))[np.arange(500), third]
    got = jax.jit(probability_of)(logits, third, temperature, jax.jit(cutoffs)(logits, *rule))
    assert (np.asarray(got) > 0).all()
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_filters_that_are_left_out_change_nothing():
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 2, (4, V)), jnp.float32)
    off = jitted(logits, jnp.full(4, 0.8), jnp.zeros(4, int), jnp.ones(4), jnp.zeros(4))
    np.testing.assert_allclose(probabilities(logits, jnp.full(4, 0.8)), off, atol=1e-7)


def test_very_different_logits_do_not_overflow():
    logits = jnp.array([[1e4, -1e4, 0.0], [20.0, -20.0, 0.0], [20.0, -20.0, 0.0]])
    law = probabilities(logits, jnp.array([0.5, 1e-30, 1e-40]))
    assert law.tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0]]


def keys_of(seeds) -> jax.Array:
    seeds = np.asarray(seeds, np.uint64)
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1)
    return request_keys(request_params(len(seeds), seed=words))


def test_keys_differ_by_request_position_and_purpose():
    keys = keys_of([0, 1, 2**32, 2**32 + 1, 2**63 - 1])
    positions = jnp.broadcast_to(jnp.arange(100), (5, 100))
    after = [partial(draft_keys, newest=jnp.full(5, newest)) for newest in (7, 8)]
    data = [jax.random.key_data(f(keys, positions)) for f in (*after, emit_keys)]
    assert len(np.unique(np.concatenate(data).reshape(-1, 2), axis=0)) == 3 * 5 * 100
    uniforms = np.asarray(accept_uniforms(keys, positions))
    assert len(np.unique(uniforms)) > 490  # of 2**23 values, two of 500 may well meet
    for f in (*after, emit_keys):
        others = jax.vmap(jax.vmap(jax.random.uniform))(f(keys, positions))
        assert not (np.asarray(others) == uniforms).any()


def test_uniforms_lie_in_the_half_open_interval_and_are_uniform():
    uniforms = np.asarray(accept_uniforms(keys_of(range(40)), jnp.zeros((40, 1), int)))
    more = np.asarray(
        accept_uniforms(keys_of(range(4)), jnp.broadcast_to(jnp.arange(5000), (4, 5000)))
    )
    for values in (uniforms, more):
        assert values.min() >= 0
        assert values.max() < 1
    counts = np.bincount((more.ravel() * 20).astype(int), minlength=20)
    assert stats.chisquare(counts).pvalue > 1e-3


def draws(weights, count: int, seed: int = 0) -> np.ndarray:
    rows = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (count, len(weights)))
    return np.asarray(sample_rows(rows, jax.random.split(jax.random.key(seed), count)))


def test_draws_follow_the_weights():
    """20000 draws; at level 1e-3 and 5 degrees of freedom w = 0.05 is found with power 0.99."""
    weights = np.array([0.1, 3.0, 0.0, 1.0, 0.02, 2.0, 0.5])  # need not sum to one
    counts = np.bincount(draws(weights, 20_000), minlength=7)
    assert counts[2] == 0
    expected = weights / weights.sum() * 20_000
    assert stats.chisquare(counts[weights > 0], expected[weights > 0]).pvalue > 1e-3


@pytest.mark.parametrize("weights", [[0, 0, 1e-30, 0], [0, 2e-38, 0, 2e-38], [0, 1, 0, 0]])
def test_a_token_without_weight_is_never_drawn(weights):
    seen = draws(weights, 500)
    assert (np.asarray(weights)[seen] > 0).all()


def test_every_row_is_drawn_with_its_own_key():
    weights = jnp.ones((3, 2, 50))
    keys = jax.random.split(jax.random.key(0), (3, 2))
    got = np.asarray(sample_rows(weights, keys))
    assert got.shape == (3, 2)
    assert len(np.unique(got)) > 3
    for b, t in itertools.product(range(3), range(2)):
        assert got[b, t] == int(sample_rows(weights[b, t][None], keys[b, t][None])[0])
