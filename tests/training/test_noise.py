"""`peagle-train drafter --noise U`: uniform noise on the tapped states that the head reads, in training only."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.training import drafter
from peagle_jax.training.passes import Run
from peagle_jax.training.stored_text import Text
from tests.training.test_heads import _options

B, S, U = 2, 50, 0.25
TEXT = Text(jnp.ones((B, S), jnp.int32), jnp.full(B, 3), jnp.full(B, S))
CLEAN = Run(TEXT.tokens, jnp.full((B, S, 12), 3.0), jnp.ones((B, S, 4)))
READERS = dict(peagle="_parallel_outcome", eagle3="unrolled_rows", evaluation="all_rows")


class ReadError(Exception):
    """The head reads a run of the target."""


def read(monkeypatch, who: str, noise: float, seed: int = 0) -> Run:
    """The run that a method's head reads in training, or that its evaluation reads."""

    def stop(head, target, run, *rest):
        raise ReadError(run)

    head = SimpleNamespace(config=SimpleNamespace(method=who))
    monkeypatch.setattr(drafter, "run_target", lambda *rest: CLEAN)
    monkeypatch.setattr(drafter, READERS[who], stop)
    options = replace(_options(), noise=noise)
    given = (lambda params: head, (), options, {}, None, TEXT)
    train = lambda: drafter.head_loss(*given, jax.random.key(seed))
    evaluate = lambda: drafter.evaluate_rows(*given)
    with pytest.raises(ReadError) as found:
        (evaluate if who == "evaluation" else train)()
    return found.value.args[0]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_training_reads_tapped_states_with_uniform_noise(method, monkeypatch):
    clean, noisy, other = (read(monkeypatch, method, *given) for given in ((0,), (U,), (U, 1)))
    np.testing.assert_array_equal(clean.taps, CLEAN.taps)
    noise = np.asarray(noisy.taps - CLEAN.taps)
    assert 0.9 * U < np.abs(noise).max() <= 1.001 * U
    assert np.abs(noise.mean()) < 0.1 * U
    assert noise.std() == pytest.approx(U / math.sqrt(3), rel=0.1)
    assert not np.array_equal(noisy.taps, other.taps), "each step has its own noise"
    np.testing.assert_array_equal(noisy.normed, CLEAN.normed)  # the labels stay the target's


def test_evaluation_has_no_noise(monkeypatch):
    np.testing.assert_array_equal(read(monkeypatch, "evaluation", U).taps, CLEAN.taps)


@pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf])
def test_noise_that_is_no_size_is_refused(noise):
    with pytest.raises(ConfigError, match="--noise"):
        replace(_options(), noise=noise)
