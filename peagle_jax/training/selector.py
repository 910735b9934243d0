"""Training of a P-EAGLE head's selector. Target and head stay as they are.

The loss is the cross entropy of the text's token among the candidates of a draft, given the text's
token before it. A token that is not among the candidates has no loss: the selector cannot choose
it. The deep drafts of all anchors are trained.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from peagle_jax.config import ConfigError
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import candidate_scores
from peagle_jax.method.selector import CANDIDATES, Selector, walk
from peagle_jax.models import Decoder
from peagle_jax.training.acceptance import lengths
from peagle_jax.training.drafter import all_rows
from peagle_jax.training.objective import by_chunk
from peagle_jax.training.passes import (
    HeadOptions,
    Text,
    run_target,
    slot_is_trained,
    text_rows,
    unembedding,
)
from peagle_jax.training.stored_text import batches, held_out, load_text, rows_of
from peagle_jax.training.texts import blocks_of
from peagle_jax.training.trainer import Params, RunConfig, Task, cast, split_model


def with_selector(head: DraftHead, selector: Selector, rank: int) -> DraftHead:
    """The head with a selector of this rank; the other weights are shared."""
    result = nnx.clone(head)
    result.config = replace(head.config, selector_rank=rank)
    result.selector = nnx.data(selector)
    return result


def _tables(head: DraftHead, target: Decoder) -> tuple[jax.Array, jax.Array]:
    """Embedding [V, D] by target ids, and unembedding [Vd, D] by draft ids, of a head."""
    embed = target.embed if head.embed is None else head.embed
    rows = unembedding(target) if head.lm_head is None else head.lm_head.weight[...]
    return embed.weight[...], rows


def _start(
    params: Params, head: DraftHead, target: Decoder, seed: int
) -> tuple[Params, dict[str, float]]:
    """(first weights, units) of a new selector's: a matrix is its weight times its unit.

    Embeddings and unembeddings of different models have different scales; in these units one
    learning rate suits all. Edges start at zero.
    """
    before, after = (float(jnp.std(x.astype(jnp.float32))) for x in _tables(head, target))
    keys = jax.random.split(jax.random.key(seed))
    for name, key in zip(("previous.weight", "hidden.weight"), keys, strict=True):
        shape = params[name].shape
        params[name] = shape[1] ** -0.5 * jax.random.normal(key, shape, jnp.float32)
    units = {"previous.weight": 1 / before, "out.weight": 1 / after}
    return params, dict.fromkeys(params, 1.0) | units


class _Drafts(NamedTuple):
    """R rows of the head over a batch, of deep drafts."""

    ids: jax.Array  # [R, C] candidates, draft ids
    logits: jax.Array  # [R, C] float32
    place: jax.Array  # [R] int32, the text's token among the candidates; -1: it is not
    hidden: jax.Array  # [R, D], normed
    before: jax.Array  # [R] int32, the text's token before
    weight: jax.Array  # [R] float32, 0 without a loss


def _deep_rows(head: DraftHead, target: Decoder, text: Text, key, options: HeadOptions) -> _Drafts:
    """The deep drafts; the first texts of a random order are read deepest."""
    text = rows_of(text, jax.random.permutation(key, len(text.tokens)))
    run = run_target(target, text, _taps(head, target))
    blocks = blocks_of(len(text.tokens), options.num_depths)
    rows = text_rows(head, target, run, slot_is_trained(text), blocks, options)
    deep = len(text.tokens)  # rows of depth 0, before these, see the token before them
    flat = lambda x: x[deep:].reshape(-1, *x.shape[2:])
    out, at, importance = map(flat, (rows.out, rows.at, rows.importance))
    following = jnp.pad(run.tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)[at]

    def one(piece):
        out, wanted = piece
        logits = head.logits(target, out)
        best, ids = jax.lax.top_k(logits, min(CANDIDATES, logits.shape[-1]))
        is_wanted = head.to_target_ids(ids) == wanted[:, None]
        place = jnp.where(is_wanted.any(-1), jnp.argmax(is_wanted, -1), -1)
        return ids, best, place, head.norm(out)

    found = by_chunk(one, (out, following), options.loss_chunk)
    before = run.tokens.reshape(-1)[at]
    return _Drafts(*found, before, jnp.where(found[2] >= 0, importance, 0.0))


def _taps(head: DraftHead, target: Decoder) -> tuple[int, ...]:
    return head.config.taps or target.config.default_taps


def _scored(selector, tables, options: HeadOptions, drafts: _Drafts):
    """(loss, metrics) of drafts; see `trainer.Task`."""
    embedding, columns = tables

    @jax.checkpoint
    def one(piece: _Drafts):
        before = embedding[piece.before][:, None]
        scores = piece.logits + selector(before, piece.hidden, columns[piece.ids])[:, 0]
        at = jnp.maximum(piece.place, 0)[..., None]
        loss = -jnp.take_along_axis(jax.nn.log_softmax(scores), at, axis=-1)[..., 0]
        right = [jnp.argmax(x, -1) == piece.place for x in (scores, piece.logits)]
        return [x * piece.weight for x in (loss, *right)]

    loss, right, right_before = (x.sum() for x in by_chunk(one, drafts, options.loss_chunk))
    count = drafts.weight.sum()
    return loss, (count, dict(accuracy=(right, count), head_accuracy=(right_before, count)))


def selected(head: DraftHead, target: Decoder, text: Text, options: HeadOptions) -> jax.Array:
    """Which drafts of a head with a selector are the target's choices: [B, num_draft, S] bool."""
    num_draft, chunk = options.num_draft, options.loss_chunk
    run = run_target(target, text, _taps(head, target))
    drafted = replace(options, num_depths=num_draft)
    rows = all_rows(head, target, run, slot_is_trained(text), drafted)
    B, S = run.tokens.shape
    by_depth = lambda x: x.reshape(B, -1, S, *x.shape[2:])
    chains = lambda x: jnp.moveaxis(by_depth(x), 1, 2).reshape(B * S, -1, *x.shape[2:])
    choices = by_chunk(
        lambda rows: jnp.argmax(rows @ unembedding(target).T, axis=-1),
        run.normed.reshape(B * S, -1),
        chunk,
    )

    def one(piece):
        out, at = piece  # [R, J, D], [R, J]
        ids, scores = candidate_scores(head, target, out, head.logits(target, out))
        taken = walk(jnp.argmax(scores, axis=-1).astype(jnp.int32))
        drafts = jnp.take_along_axis(ids, taken[..., None], axis=-1)[..., 0]
        return head.to_target_ids(drafts) == choices[at]

    match = by_chunk(one, (chains(rows.out), chains(rows.at)), max(1, chunk // num_draft))
    return jnp.moveaxis(match.reshape(B, S, -1), 1, 2) & by_depth(rows.used)


def make_task(head: DraftHead, target: Decoder, options: HeadOptions, run: RunConfig, rank: int):
    """The task, and the function from trained weights to the head with a selector of this rank.

    Raises:
      ConfigError: a head that cannot have a selector, or options that do not fit the texts.
    """
    if head.config.method != "peagle":
        raise ConfigError("a selector belongs to a P-EAGLE head: EAGLE-3 sees its earlier drafts")
    load = partial(load_text, target.config, options.texts, taps=_taps(head, target))
    text, heldout = load("train"), load("heldout")
    pieces = held_out(heldout, options.batch, options.eval_sequences)
    config = replace(head.config, selector_rank=rank)
    new = Selector(config, dtype=jnp.float32, rngs=nnx.Rngs(run.seed))
    params, merge = split_model(new)
    params, units = _start(params, head, target, run.seed)
    scaled = lambda params: {name: units[name] * leaf for name, leaf in params.items()}
    constants, merge_models = split_model(_Models(head, target))

    def loss(params, constants, text, key):
        models = merge_models(constants)
        drafts = _deep_rows(models.head, models.target, text, key, options)
        selector = merge(cast(scaled(params), options.dtype))
        tables = _tables(models.head, models.target)
        return _scored(selector, tables, options, jax.lax.stop_gradient(drafts))

    @jax.jit
    def evaluate_batch(params, constants, text):
        with dispatch.references():  # as in training
            models = merge_models(constants)
            selector = merge(cast(scaled(params), options.dtype))
            trained = with_selector(models.head, selector, rank)
            drafts = _deep_rows(trained, models.target, text, jax.random.key(0), options)
            tables = _tables(trained, models.target)
            loss, (count, _) = _scored(selector, tables, options, drafts)
            return selected(trained, models.target, text, options), loss, count

    def evaluate(params):
        parts = [jax.device_get(evaluate_batch(params, constants, piece)) for piece in pieces]
        match, losses, counts = (np.stack(part) for part in zip(*parts, strict=True))
        match = match.reshape(-1, *match.shape[2:])
        loss = float(losses.sum() / max(counts.sum(), 1))
        return dict(loss=loss, **lengths(match, heldout, options.num_draft))

    task = Task(
        params=params,
        loss=loss,
        constants=constants,
        batch=batches(text, options.batch, run.seed),
        evaluate=evaluate,
        tokens_per_step=options.batch * text.tokens.shape[1],
    )
    return task, lambda params: with_selector(head, merge(scaled(params)), rank)


class _Models(nnx.Module):
    """A head and its target as one tree of weights."""

    def __init__(self, head: DraftHead, target: Decoder):
        self.head, self.target = head, target
