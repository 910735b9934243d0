"""Small trainings for tests: options, runs and stored texts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.training import passes
from peagle_jax.training.trainer import RunConfig
from tests import tiny

S = 12


def head_options(**changes) -> passes.HeadOptions:
    base = dict(
        texts=None,
        batch=2,
        num_depths=4,
        dtype="float32",
        loss_chunk=16,
        eval_sequences=2,
        num_draft=3,
    )
    return passes.HeadOptions(**(base | changes))


def run_config(out: Path, steps: int, **changes) -> RunConfig:
    base = dict(
        out=out,
        steps=steps,
        minutes=None,
        optimizer="muon",
        learning_rate=3e-3,
        adam_learning_rate=2e-3,
        weight_decay=0.0,
        warmup=2,
        decay=0.4,
        clip=1.0,
        microbatches=1,
        seed=0,
        log_every=5,
        eval_every=20,
        save_every=20,
    )
    return RunConfig(**(base | changes))


def three_texts() -> passes.Text:
    """Random texts of `tiny.TARGET`, one of them to its last token."""
    tokens = jax.random.randint(jax.random.key(5), (3, S), 3, tiny.TARGET.vocab_size)
    return passes.Text(tokens, jnp.array([2, 4, 5]), jnp.array([S, S - 2, S - 1]))


def save_texts(folder: Path, vocab_size: int, *, count: int = 8, length: int = 40) -> None:
    """train.npz and heldout.npz of random tokens after prompts of six."""
    rng = np.random.default_rng(3)
    folder.mkdir(exist_ok=True)
    for split in ("train", "heldout"):
        tokens = rng.integers(8, vocab_size, (count, length)).astype(np.uint32)
        ends = dict(prompt=np.full(count, 6), length=np.full(count, length))
        np.savez(folder / f"{split}.npz", tokens=tokens, **ends)


@jax.jit
def run_target(target, text: passes.Text) -> passes.Run:
    return passes.run_target(target, text, tiny.HEAD.taps)
