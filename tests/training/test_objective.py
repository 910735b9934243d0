"""The chunked losses against their definitions, differentiated by JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.training.objective import (
    _UNLIKELY,
    LK_ETA,
    Distribution,
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
    hidden, weight = (jax.random.normal(keys[i], (n, WIDTH)) for i, n in ((3, ROWS), (4, VOCAB)))
    temperature = 0.5 if kind == "sharpened" else 1.0
    if kind == "table":  # nine positions, picked several times
        index = jax.random.randint(keys[3], (ROWS,), 0, 9)
        teacher = Table(index, *tabulate(hidden[:9], weight, temperature, None, 4))
        return student, importance, teacher, jax.nn.softmax(hidden @ weight.T)[index]
    p = jax.nn.softmax(hidden @ weight.T / temperature)
    return student, importance, Distribution(hidden, weight, temperature), p


def _definition(loss: str, p, z):
    log_q = jax.nn.log_softmax(z)
    kl = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - log_q), 0).sum(-1)
    acceptance = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
    share = jnp.exp(-LK_ETA * jax.lax.stop_gradient(acceptance))
    mixed = share * kl + (1 - share) * (1 - acceptance)
    hit = (p * jnp.exp(log_q)).sum(-1)
    unlikely = jnp.where(hit > _UNLIKELY, -jnp.log(1 - jnp.minimum(hit, 0.999)), 0)
    return dict(kl=kl, tv=1 - acceptance, lk=mixed, unlikely=unlikely)[loss]


KINDS = ("labels", "distribution", "sharpened", "table")
CASES = [*itertools.product(KINDS, ("kl", "tv", "lk")), ("labels", "unlikely")]


@pytest.mark.sampled(3, slow=4)
@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_chunked_loss_and_gradient_equal_the_plain_ones(kind, loss):
    student, importance, teacher, p = _problem(kind)
    plain = lambda x, w: 3.0 * (importance * _definition(loss, p, x @ w.T)).sum()
    chunked = lambda x, w: 3.0 * distill(x, w, teacher, importance, 7, loss).total
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(*student) for f in (chunked, plain))
    assert float(jnp.abs(want[1][0]).max()) > 0.1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(chunked(*student), got[0], rtol=1e-6)  # without the gradient


def test_reports_are_the_same_for_every_loss():
    student, importance, teacher, p = _problem("distribution")
    run = lambda loss: distill(*student, teacher, importance, 7, loss)
    want = run("kl")
    np.testing.assert_allclose(want.kl, _definition("kl", p, student[0] @ student[1].T), rtol=1e-3)
    for loss in ("tv", "lk"):
        np.testing.assert_array_equal(run(loss).kl, want.kl)
        np.testing.assert_array_equal(run(loss).match, want.match)


@pytest.mark.parametrize("kind", ["labels", "table"])
def test_bfloat16_states_give_nearly_the_float32_gradient(kind):
    """Their logits are rounded to bfloat16 on the way; sums over the vocabulary are not."""
    student, importance, teacher, _ = _problem(kind)
    rounded = tuple(x.astype(jnp.bfloat16) for x in student)
    loss = lambda x, w: distill(x, w, teacher, importance, 7, "kl").total
    exact = jax.grad(loss, (0, 1))(*(x.astype(jnp.float32) for x in rounded))
    for got, want in zip(jax.grad(loss, (0, 1))(*rounded), exact, strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
        assert 0 < float(error) < 0.02


def test_label_probabilities_are_those_of_the_whole_softmax():
    student, _, labels, one_hot = _problem("labels")
    got = label_probabilities(*student, labels.token, 7)
    want = (jax.nn.softmax(student[0] @ student[1].T) * one_hot).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-4)
