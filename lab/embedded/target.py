"""Next-token training of a small target, and a penalty on the repeats in its own greedy texts."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.models import Decoder, build
from peagle_jax.training.attention import causal
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.objective import Labels, by_chunk, distill
from peagle_jax.training.passes import unembedding
from peagle_jax.training.stored_text import Text, batches, load_text
from peagle_jax.training.trainer import RunConfig, Task, cast, split_model
from peagle_jax.training.weights import repeated

LEAST_LIKELY = 0.3
"""Repeats below this probability are left alone: pushed further down, they only raise nonsense."""
_LEAST_REST = 1e-4  # of the probability of other tokens; bounds the loss of a certain repeat


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Batch shape and arithmetic of target training."""

    data: Path
    sequence: int
    batch: int  # sequences per step
    dtype: str
    loss_chunk: int = 8192
    eval_sequences: int = 256
    text: Path | None = None  # greedy texts of this target, for the penalty on repeats
    text_batch: int = 64  # texts per step
    penalty: float = 1.0  # weight of a repeated token; a token of source has weight 1


class Batch(NamedTuple):
    """Start offsets [B] of windows of the token stream, and texts of the target, or None."""

    starts: np.ndarray
    text: Text | None


def windows(step: int, *, batch: int, width: int, length: int, seed: int) -> np.ndarray:
    """Start offsets [batch] of this step's windows.

    The stream is cut into windows. Every epoch has a new random offset and a new random order.
    """
    per_epoch = (length - width) // width
    first = step * batch
    starts = np.empty(batch, np.int32)
    for epoch in range(first // per_epoch, (first + batch - 1) // per_epoch + 1):
        rng = np.random.default_rng((seed, epoch))
        shift = rng.integers(0, width)
        order = rng.permutation(per_epoch)
        lo, hi = max(first, epoch * per_epoch), min(first + batch, (epoch + 1) * per_epoch)
        chosen = order[lo - epoch * per_epoch : hi - epoch * per_epoch]
        starts[lo - first : hi - first] = shift + chosen * width
    return starts


def _states(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Normed states [B * S, D] of texts [B, S]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = [None] * model.config.num_layers
    hidden, _, _ = model(tokens, positions, cache, causal)
    return model.norm(hidden).reshape(-1, hidden.shape[-1])


def written_repeats(text: Text) -> jax.Array:
    """Trained tokens [B, S] that end 8 tokens which occurred earlier in the text."""
    at = jnp.arange(text.tokens.shape[1])
    written = (at >= text.prompt[:, None]) & (at < text.length[:, None])
    return repeated(text.tokens) & (written if text.answer is None else text.answer)


def unlikelihood(
    states: jax.Array, weight: jax.Array, token: jax.Array, counts: jax.Array, chunk: int
) -> jax.Array:
    """Sum of -log(1 - p(token)) over the rows that count, where p is above `LEAST_LIKELY`.

    Unlikelihood training, arXiv 1908.04319, equation 2.

    Args:
      states: [R, D]; weight: [V, D]; token, counts: [R].
    """

    @jax.checkpoint
    def one(rows):
        states, token, counts = rows
        z = jnp.einsum("rd,vd->rv", states, weight, preferred_element_type=jnp.float32)
        p = jnp.take_along_axis(jax.nn.softmax(z, axis=-1), token[:, None], axis=1)[:, 0]
        loss = -jnp.log(jnp.maximum(1 - p, _LEAST_REST))
        return jnp.where(counts & (p > LEAST_LIKELY), loss, 0.0)

    return by_chunk(one, (states, token, counts), chunk).sum()


def lm_loss(merge, options: TargetOptions, params, stream, batch: Batch, key):
    """Cross entropy of windows of the token stream, plus the penalty on repeats in texts."""
    del key
    model = merge(cast(params, options.dtype))
    cut = jax.vmap(lambda at: jax.lax.dynamic_slice(stream, (at,), (options.sequence + 1,)))
    tokens = cut(batch.starts).astype(jnp.int32)
    ones = jnp.ones(len(tokens) * options.sequence, jnp.float32)
    rows, labels = _states(model, tokens[:, :-1]), Labels(tokens[:, 1:].reshape(-1))
    result = distill(rows, unembedding(model), labels, ones, options.loss_chunk)
    count = ones.sum()
    metrics = dict(accuracy=(result.match.sum(), count))
    if batch.text is None:
        return result.total, (count, metrics)
    text = batch.text._replace(tokens=batch.text.tokens.astype(jnp.int32))
    repeats = written_repeats(text)
    # cuDNN refuses odd lengths, so the last token stays; it predicts nothing.
    ahead = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    penalty = unlikelihood(
        _states(model, text.tokens),
        unembedding(model),
        ahead(text.tokens),
        ahead(repeats),
        options.loss_chunk,
    )
    metrics |= dict(cross_entropy=(result.total, count), unlikelihood=(penalty, repeats.sum()))
    return result.total + options.penalty * penalty, (count, metrics)


def _training_batches(
    config: TargetConfig, options: TargetOptions, run: RunConfig, width: int, length: int
):
    """Step -> `Batch`.

    Raises:
      ConfigError: `options.text` has too few texts or other tokens, or `--microbatches` does not
        divide a step's.
    """
    order = partial(windows, batch=options.batch, width=width, length=length, seed=run.seed)
    if options.text is None:
        return lambda step: Batch(order(step), None)
    text = load_text(config, options.text, "train")
    size = options.text_batch
    if size > len(text.tokens) or size % run.microbatches:
        raise ConfigError(
            f"--text-batch {size} must be a multiple of --microbatches and at most "
            f"{len(text.tokens)}, the number of texts in {options.text}"
        )
    texts = batches(text, size, run.seed)
    return lambda step: Batch(order(step), texts(step))


def make_task(
    config: TargetConfig, options: TargetOptions, run: RunConfig, init: Decoder | None = None
) -> tuple[Task, object]:
    """The task, and the function from its parameters to a model; `init` is a start."""
    stream = np.load(options.data / "train.npy")
    heldout = np.load(options.data / "heldout.npy")
    width = options.sequence + 1
    for name, tokens in (("train", stream), ("heldout", heldout)):
        if len(tokens) < 2 * width:
            raise ConfigError(
                f"{name}.npy has {len(tokens)} tokens; --sequence needs {2 * width}; lower "
                "--sequence or give `data` more text"
            )
    model = init or build(config, dtype=jnp.float32, rngs=nnx.Rngs(run.seed))
    model.embed = TrainedEmbed(model.embed)
    params, merge = split_model(model)
    loss = partial(lm_loss, merge, options)

    device_heldout = jnp.asarray(heldout)
    per_call = options.batch // run.microbatches
    count = min(options.eval_sequences, len(heldout) // width)
    starts = [np.arange(i, min(i + per_call, count)) * width for i in range(0, count, per_call)]
    evaluate_batch = jax.jit(loss)

    def evaluate(params):
        results = [
            evaluate_batch(params, device_heldout, Batch(s.astype(np.int32), None), None)
            for s in starts
        ]
        total = sum(float(r[0]) for r in results)
        rows = sum(float(r[1][0]) for r in results)
        right = sum(float(r[1][1]["accuracy"][0]) for r in results)
        return dict(loss=total / rows, accuracy=right / rows)

    task = Task(
        params=params,
        loss=loss,
        constants=jnp.asarray(stream),
        batch=_training_batches(config, options, run, width, len(stream)),
        evaluate=evaluate,
        tokens_per_step=options.batch * options.sequence,
    )
    return task, merge
