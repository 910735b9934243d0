"""Next-token training of a small `models.Decoder`, and a penalty on the repeats in its own texts."""

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
from peagle_jax.training import attention
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.objective import Labels, Loss, distill
from peagle_jax.training.stored_text import Text, batches, load_text
from peagle_jax.training.trainer import RunConfig, Task, cast, split_model
from peagle_jax.training.weights import repeated


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Batch shape and arithmetic of target training."""

    data: Path
    sequence: int
    batch: int  # sequences per step
    dtype: str
    attention: attention.Backend
    loss_chunk: int
    eval_sequences: int
    text: Path | None = None  # `continuations` of this target, for the penalty on repeats
    text_batch: int = 64  # texts per step
    penalty: float = 1.0  # weight of a repeated token; a token of source has weight 1


class Batch(NamedTuple):
    """Start offsets [B] of windows of the token stream, and texts of the target, if there are any."""

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


def unembedding(model: Decoder) -> jax.Array:
    """The [V, D] weight that maps normed states to logits."""
    return (model.embed if model.lm_head is None else model.lm_head).weight[...]


def _predictions(model, tokens, labels, importance, options: TargetOptions, loss: Loss):
    """The loss of `labels` [B, S], each predicted from the `tokens` [B, S] up to its place."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = [None] * model.config.num_layers
    hidden, _, _ = model(tokens, positions, cache, attention.causal(options.attention))
    rows = model.norm(hidden).reshape(-1, hidden.shape[-1])
    teacher = Labels(labels.reshape(-1))
    weight = unembedding(model)
    return distill(rows, weight, teacher, importance.reshape(-1), options.loss_chunk, loss)


def written_repeats(text: Text) -> jax.Array:
    """Positions [B, S] of written tokens that end 8 tokens which occurred earlier in the text."""
    at = jnp.arange(text.tokens.shape[1])
    written = (at >= text.prompt[:, None]) & (at < text.length[:, None])
    return repeated(text.tokens) & written


def lm_loss(merge, options: TargetOptions, params, stream, batch: Batch, key):
    """Cross entropy of windows of the token stream, plus the penalty on repeats in texts of the target."""
    del key
    model = merge(cast(params, options.dtype))
    cut = jax.vmap(lambda at: jax.lax.dynamic_slice(stream, (at,), (options.sequence + 1,)))
    tokens = cut(batch.starts).astype(jnp.int32)
    ones = jnp.ones((len(tokens), options.sequence), jnp.float32)
    result = _predictions(model, tokens[:, :-1], tokens[:, 1:], ones, options, "kl")
    count = ones.sum()
    metrics = dict(accuracy=(result.match.sum(), count))
    if batch.text is None:
        return result.total, (count, metrics)
    text = batch.text._replace(tokens=batch.text.tokens.astype(jnp.int32))
    repeats = written_repeats(text)
    # cuDNN refuses odd lengths, so the last token stays; it predicts nothing.
    ahead = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
    importance = ahead(repeats).astype(jnp.float32)
    penalty = _predictions(
        model, text.tokens, ahead(text.tokens), importance, options, "unlikely"
    ).total
    written = jnp.maximum(text.length - text.prompt, 0).sum().astype(jnp.float32)
    metrics |= dict(
        cross_entropy=(result.total, count), repeats=(repeats.sum(), written),
        unlikelihood=(penalty, importance.sum()),
    )  # fmt: skip
    return result.total + options.penalty * penalty, (count, metrics)


def _training_batches(
    config: TargetConfig, options: TargetOptions, run: RunConfig, width: int, length: int
):
    """Step -> `Batch`.

    Raises:
      ConfigError: `options.text` has too few greedy texts or other tokens, or `--microbatches` does not
        divide a step's.
    """
    order = partial(windows, batch=options.batch, width=width, length=length, seed=run.seed)
    if options.text is None:
        return lambda step: Batch(order(step), None)
    text = load_text(config, options.text, "train", 0)
    size = options.text_batch
    if size > len(text.tokens) or size % run.microbatches:
        raise ConfigError(
            f"--text-batch {size} must be a multiple of --microbatches and at most {len(text.tokens)}, "
            f"the number of greedy texts in {options.text}"
        )
    texts = batches(text, size, run.seed)
    return lambda step: Batch(order(step), texts(step))


def make_task(
    config: TargetConfig, options: TargetOptions, run: RunConfig, init: Decoder | None = None
) -> tuple[Task, object]:
    """The task, and the function from its parameters to a model; `init` is a target to start from."""
    stream = np.load(options.data / "train.npy")
    heldout = np.load(options.data / "heldout.npy")
    width = options.sequence + 1
    for name, tokens in (("train", stream), ("heldout", heldout)):
        if len(tokens) < 2 * width:
            raise ConfigError(
                f"{name}.npy has {len(tokens)} tokens; --sequence needs {2 * width}; lower --sequence "
                "or give `data` more text"
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
