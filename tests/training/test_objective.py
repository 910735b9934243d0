"""The chunked loss against its definition, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.training.objective import (
    Labels,
    Table,
    distill,
    label_probabilities,
    tabulate,
)

ROWS, VOCAB, WIDTH = 23, 30, 8


def _problem(kind: str):
    """Student rows and weight, a teacher, and the teacher's probabilities."""
    keys = jax.random.split(jax.random.key(0), 5)
    student = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[1], (VOCAB, WIDTH))
    importance = jax.random.uniform(keys[2], (ROWS,))
    if kind == "labels":
        token = jax.random.randint(keys[3], (ROWS,), 0, VOCAB)
        return student, importance, Labels(token), jax.nn.one_hot(token, VOCAB)
    hidden, weight = (jax.random.normal(keys[i], (n, WIDTH)) for i, n in ((3, 9), (4, VOCAB)))
    z, cap = hidden @ weight.T, 2.0 if kind == "capped table" else None
    z = z if cap is None else cap * jnp.tanh(z / cap)
    index = jax.random.randint(keys[3], (ROWS,), 0, 9)  # nine positions, picked several times
    teacher = Table(index, *tabulate(hidden, weight, cap, 4))
    return student, importance, teacher, jax.nn.softmax(z)[index]


def _divergence(p, z):
    log_q = jax.nn.log_softmax(z)
    return jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - log_q), 0).sum(-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["labels", "table", "capped table"])
def test_chunked_loss_and_gradient_equal_the_plain_ones(kind):
    student, importance, teacher, p = _problem(kind)
    plain = lambda x, w: 3.0 * (importance * _divergence(p, x @ w.T)).sum()
    chunked = lambda x, w: 3.0 * distill(x, w, teacher, importance, 7).total
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(*student) for f in (chunked, plain))
    assert float(jnp.abs(want[1][0]).max()) > 0.1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    result = distill(*student, teacher, importance, 7)  # without the gradient
    np.testing.assert_allclose(3.0 * result.total, got[0], rtol=1e-6)
    z = student[0] @ student[1].T
    np.testing.assert_allclose(result.kl, _divergence(p, z), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(result.match, jnp.argmax(z, -1) == jnp.argmax(p, -1))


@pytest.mark.parametrize("kind", ["labels", "table"])
def test_bfloat16_states_give_nearly_the_float32_gradient(kind):
    """Their logits are rounded to bfloat16 on the way; sums over the vocabulary are not."""
    student, importance, teacher, _ = _problem(kind)
    rounded = tuple(x.astype(jnp.bfloat16) for x in student)
    loss = lambda x, w: distill(x, w, teacher, importance, 7).total
    exact = jax.grad(loss, (0, 1))(*(x.astype(jnp.float32) for x in rounded))
    for got, want in zip(jax.grad(loss, (0, 1))(*rounded), exact, strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
        assert 0 < float(error) < 0.02


def test_label_probabilities_are_those_of_the_whole_softmax():
    student, _, labels, one_hot = _problem("labels")
    got = label_probabilities(*student, labels.token, 7)
    want = (jax.nn.softmax(student[0] @ student[1].T) * one_hot).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-4)
