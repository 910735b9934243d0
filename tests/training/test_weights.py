"""Weights of elements, against their definitions in plain loops."""

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.training.weights import anchor_weights, pace_weights, repeated


def _ends_before(tokens: list[int], p: int, n: int) -> bool:
    """Whether the last n tokens up to p also end at an earlier position."""
    suffix = tokens[p - n + 1 : p + 1]
    return p + 1 >= n and any(tokens[j - n + 1 : j + 1] == suffix for j in range(n - 1, p))


def test_a_repeat_ends_tokens_that_ended_before():
    tokens = np.random.default_rng(0).integers(0, 3, (4, 60))
    tokens[1, 40:52] = tokens[1, 10:22]
    got = np.asarray(jax.jit(repeated, static_argnums=1)(tokens, 4))
    want = np.array([[_ends_before(row, p, 4) for p in range(60)] for row in tokens.tolist()])
    assert want.any()
    assert not want.all()
    np.testing.assert_array_equal(got, want)


def test_an_anchor_counts_as_a_repeat_by_its_newest_token():
    tokens = np.tile(np.arange(10), 2)[None]  # the second half repeats the first
    weights = np.asarray(anchor_weights(jnp.asarray(tokens), 0.2))
    # x_17 is the first token that ends eight which occurred before; slot 16 has seen it.
    np.testing.assert_allclose(weights[0], [*[1.0] * 16, *[0.2] * 3, 1.0], rtol=1e-6)


def _paces(q: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Depths of one anchor: w_j = sum over m >= j of the product of the paces up to m."""
    pace = np.where(used, 0.5 * q + 0.5, 0)
    products = np.cumprod(pace)
    return np.array([products[j:].sum() for j in range(len(q))])


def test_pace_weights_are_the_expected_rest_of_the_chain():
    rng = np.random.default_rng(1)
    q = rng.random((4, 3, 5)).astype(np.float32)  # depth, text, slot
    used = np.ones((4, 3, 5), bool)
    for depth in range(4):
        used[depth, :, 5 - depth :] = False  # past the end of the text
    got = np.stack(jax.jit(pace_weights)(list(q), list(used)))
    for text in range(3):
        for slot in range(5):
            want = _paces(q[:, text, slot], used[:, text, slot])
            np.testing.assert_allclose(got[:, text, slot], want, rtol=1e-5)


def test_a_dropped_text_takes_the_mean_rest_of_the_others():
    q = [np.full((2, 1), 0.8, np.float32), np.full((1, 1), 0.6, np.float32)]
    used = [np.ones((2, 1), bool), np.ones((1, 1), bool)]
    first, second = (np.asarray(x) for x in pace_weights(q, used))
    np.testing.assert_allclose(first, [[0.9 * 1.8], [0.9 * 1.8]], rtol=1e-6)
    np.testing.assert_allclose(second, [[0.9 * 0.8]], rtol=1e-6)
