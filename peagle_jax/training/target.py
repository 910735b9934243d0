"""Next-token training of a small `models.Decoder`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.models import Decoder, build
from peagle_jax.training import attention
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.objective import Labels, distill
from peagle_jax.training.trainer import RunConfig, Task, cast, split_model


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


def lm_loss(merge, options: TargetOptions, params, stream, starts, key):
    """Cross entropy summed over windows cut from the token stream on the device."""
    del key
    model = merge(cast(params, options.dtype))
    S = options.sequence
    cut = jax.vmap(lambda at: jax.lax.dynamic_slice(stream, (at,), (S + 1,)))
    tokens = cut(starts).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(S), (tokens.shape[0], S))
    cache = [None] * model.config.num_layers
    attend = attention.causal(options.attention)
    hidden, _, _ = model(tokens[:, :-1], positions, cache, attend)
    rows = model.norm(hidden).reshape(-1, hidden.shape[-1])
    ones = jnp.ones(rows.shape[0], jnp.float32)
    labels = Labels(tokens[:, 1:].reshape(-1))
    result = distill(rows, unembedding(model), labels, ones, options.loss_chunk, "kl")
    count = ones.sum()
    return result.total, (count, dict(accuracy=(result.match.sum(), count)))


def make_task(config: TargetConfig, options: TargetOptions, run: RunConfig) -> tuple[Task, object]:
    """The training task, and the function from its parameters to a model."""
    stream = np.load(options.data / "train.npy")
    heldout = np.load(options.data / "heldout.npy")
    width = options.sequence + 1
    for name, tokens in (("train", stream), ("heldout", heldout)):
        if len(tokens) < 2 * width:
            raise ConfigError(f"{name}.npy has {len(tokens)} tokens; --sequence needs {2 * width}")
    model = build(config, dtype=jnp.float32, rngs=nnx.Rngs(run.seed))
    model.embed = TrainedEmbed(model.embed)
    params, merge = split_model(model)
    loss = partial(lm_loss, merge, options)
    order = partial(windows, batch=options.batch, width=width, length=len(stream), seed=run.seed)

    device_heldout = jnp.asarray(heldout)
    per_call = options.batch // run.microbatches
    count = min(options.eval_sequences, len(heldout) // width)
    starts = [np.arange(i, min(i + per_call, count)) * width for i in range(0, count, per_call)]
    evaluate_batch = jax.jit(loss)

    def evaluate(params):
        results = [evaluate_batch(params, device_heldout, s.astype(np.int32), None) for s in starts]
        total = sum(float(r[0]) for r in results)
        rows = sum(float(r[1][0]) for r in results)
        right = sum(float(r[1][1]["accuracy"][0]) for r in results)
        return dict(loss=total / rows, accuracy=right / rows)

    task = Task(
        params=params,
        loss=loss,
        constants=jnp.asarray(stream),
        batch=order,
        evaluate=evaluate,
        tokens_per_step=options.batch * options.sequence,
    )
    return task, merge
