"""The penalty on repeats in a target's greedy texts (`peagle-train target --text`)."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.training import attention, objective
from peagle_jax.training.stored_text import Text
from peagle_jax.training.target import (
    Batch,
    TargetOptions,
    lm_loss,
    make_task,
    unembedding,
    written_repeats,
)
from peagle_jax.training.trainer import RunConfig, split_model
from tests import tiny

LOOP = list(range(20, 29))  # nine tokens


@pytest.fixture
def text() -> Text:
    """Two texts of 32 tokens: a loop of nine tokens after three of a prompt, and one without repeats."""
    loop = [5, 6, 7, *(LOOP * 4)][:32]
    tokens = np.array([loop, range(30, 62)], np.int32)
    return Text(tokens, np.array([3, 3], np.int32), np.array([32, 32], np.int32))


def test_a_repeat_is_a_written_token_that_ends_eight_seen_ones(text):
    # The loop's second turn starts at 12; its eighth token is the first to end a repeat.
    (first, second) = np.asarray(written_repeats(jax.tree.map(jnp.asarray, text)))
    np.testing.assert_array_equal(np.flatnonzero(first), range(19, 32))
    assert not second.any()
    given = text._replace(prompt=np.array([25, 3]), length=np.array([30, 32]))
    (first, _) = np.asarray(written_repeats(jax.tree.map(jnp.asarray, given)))
    np.testing.assert_array_equal(np.flatnonzero(first), range(25, 30))


def test_the_loss_adds_the_penalty_of_each_repeat(text, monkeypatch):
    monkeypatch.setattr(objective, "_UNLIKELY", 0.0)  # a random model finds nothing likely
    model = tiny.target()
    params, merge = split_model(model)
    options = TargetOptions(
        data=Path(), sequence=8, batch=2, dtype="float32", attention="xla", loss_chunk=16,
        eval_sequences=2, penalty=2.0,
    )  # fmt: skip
    stream, starts = jnp.arange(40, dtype=jnp.uint16) % 60, np.array([0, 9], np.int32)
    total = lambda penalty, batch: lm_loss(
        merge, replace(options, penalty=penalty), params, stream, batch, None
    )
    with_text, (_, metrics) = total(2.0, Batch(starts, text))
    without, _ = total(2.0, Batch(starts, None))
    np.testing.assert_allclose(total(0.0, Batch(starts, text))[0], without, rtol=1e-6)

    positions = jnp.broadcast_to(jnp.arange(32), (2, 32))
    hidden, _, _ = model(
        jnp.asarray(text.tokens), positions, [None] * model.config.num_layers,
        attention.causal("xla"),
    )  # fmt: skip
    probs = jax.nn.softmax(model.norm(hidden) @ unembedding(model).T)
    repeats = [(0, i) for i in range(19, 32)]
    want = -sum(np.log(1 - float(probs[b, i - 1, text.tokens[b, i]])) for b, i in repeats)
    np.testing.assert_allclose(with_text - without, 2 * want, rtol=1e-3)
    assert float(metrics["repeats"][0]) == len(repeats)
    np.testing.assert_allclose(metrics["unlikelihood"][0], want, rtol=1e-3)


@pytest.mark.parametrize("size", [3, 50])
def test_a_text_batch_that_does_not_fit_is_refused(tmp_path, text, size):
    for name in ("train", "heldout"):
        np.save(tmp_path / f"{name}.npy", np.arange(200, dtype=np.uint16) % 60)
    np.savez(tmp_path / "train.npz", **text.arrays(), temperature=np.zeros(2))
    options = TargetOptions(
        data=tmp_path, sequence=8, batch=4, dtype="float32", attention="xla", loss_chunk=16,
        eval_sequences=2, text=tmp_path, text_batch=size,
    )  # fmt: skip
    run = RunConfig(
        out=tmp_path, steps=1, minutes=None, optimizer="muon", learning_rate=1e-3,
        adam_learning_rate=1e-3, weight_decay=0.0, warmup=1, decay=0.1, clip=1.0, microbatches=2,
        seed=0, log_every=1, eval_every=1, save_every=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--text-batch"):
        make_task(tiny.target().config, options, run)
