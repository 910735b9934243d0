"""Forward passes of the frozen target and of a head over a batch of texts, and their comparison.

Element (a, d), slot p = a + d, drafts x_{p+2}; its label is the target's output distribution at
position p + 1. P-EAGLE and DFlash train all elements in one pass; EAGLE-3 unrolls its feedback.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from peagle_jax.config import ConfigError
from peagle_jax.method.block_head import BlockHead
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.models.cache import PageCache, PagedAttention
from peagle_jax.training.attention import UnrolledAttention
from peagle_jax.training.blocks import TextBlocks
from peagle_jax.training.embedding import MaskedRows, TrainedEmbed
from peagle_jax.training.objective import (
    Table,
    by_chunk,
    distill,
    label_probabilities,
    tabulate,
)
from peagle_jax.training.picked import Picked, narrowed, pick
from peagle_jax.training.stored_text import Text
from peagle_jax.training.texts import Blocks, TextAttention
from peagle_jax.training.weights import anchor_weights, pace_weights

_PAGE_SIZE = 64  # positions; a block of keys of the attention kernels
_STEP_DECAY = 0.8  # EAGLE-3: unrolled step s weighs _STEP_DECAY**s
_BLOCK_DECAY = 4.0  # DFlash: draft d of a block weighs exp(-d / _BLOCK_DECAY), for blocks of eight


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of a head's loss."""

    num_depths: int  # K_train; of EAGLE-3 the unrolled steps
    dtype: str
    loss_chunk: int  # rows whose logits are in memory at once
    anchors: int | None = None  # of each text that are trained; None: all
    repeat_weight: float = 0.2  # of anchors in text that occurred before


@dataclass(frozen=True, kw_only=True)
class HeadOptions(LossOptions):
    """Options of training a head, or its selector, on stored texts."""

    texts: Path  # folder of train.npz and heldout.npz
    batch: int  # texts of a step
    num_draft: int = 7  # J of the simulated acceptance length
    eval_sequences: int = 512


class Rows(NamedTuple):
    """A head's output in rows [A, T]: a text with its elements, or a text at one depth."""

    out: jax.Array  # [A, T, D], before the final norm
    at: jax.Array  # [A, T] int32, text * S + position whose output is the label
    used: jax.Array  # [A, T] bool
    importance: jax.Array  # [A, T] float32, 0 where not used


class Outcome(NamedTuple):
    """The loss, and its divisor, the sum of all importances; the rest is per row, [A, T]."""

    total: jax.Array
    count: jax.Array
    kl: jax.Array
    match: jax.Array
    used: jax.Array


def slot_is_trained(text: Text) -> jax.Array:
    """Slots [B, S] that enter the loss: x_{p+1} was generated and x_{p+2} exists.

    Example: prompt 3, length 6 -> slots 2 and 3, the first two from which the engine would draft.
    """
    if text.answer is not None:
        return _ahead(text.answer, 1) & _ahead(text.answer, 2)
    p = jnp.arange(text.tokens.shape[1])
    return (p + 1 >= text.prompt[:, None]) & (p + 2 <= text.length[:, None] - 1)


def _ahead(x: jax.Array, d: int) -> jax.Array:
    """x [B, S, ...] at position p + d, zero past the end."""
    return jnp.pad(x[:, d:], [(0, 0), (0, d)] + [(0, 0)] * (x.ndim - 2))


class Run(NamedTuple):
    """The target's pass over a batch."""

    tokens: jax.Array  # [B, S] int32
    taps: jax.Array  # [B, S, A*D]
    normed: jax.Array  # [B, S, D], input of the unembedding


def run_target(target: Decoder, text: Text, taps: tuple[int, ...]) -> Run:
    """The target's pass as the engine prefills: attention over pages, kernels of the device.

    Compiled by itself: kernels that write to pages have no derivative, and within a loss each of
    their writes would be differentiated, though nothing of the target is trained. Texts that have
    their states need no pass.
    """
    if text.taps is not None:
        return Run(text.tokens.astype(jnp.int32), text.taps, text.normed)

    @jax.jit
    def run(target: Decoder, tokens: jax.Array) -> Run:
        with dispatch.as_served():
            hidden, tapped = served_pass(target, tokens, taps)
            return Run(tokens, tapped, target.norm(hidden))

    return jax.tree.map(jax.lax.stop_gradient, run(target, text.tokens.astype(jnp.int32)))


def served_pass(
    target: Decoder, tokens: jax.Array, taps: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array | None]:
    """Hidden states [B, S, D] and taps of whole texts [B, S] int32, with attention over pages."""
    B, S = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(S), tokens.shape)
    # At least two pages, 128 positions: the reference's blocks of keys are then the engine's.
    W = max(2, -(-S // _PAGE_SIZE))
    table = 1 + jnp.arange(B * W, dtype=jnp.int32).reshape(B, W)  # page 0 is the dummy page
    attend = PagedAttention(table, jnp.arange(B, dtype=jnp.int32), positions)
    cache = [_pages(target, i, 1 + B * W) for i in range(target.config.num_layers)]
    return target(tokens, positions, cache, attend, taps=taps)[:2]


def _pages(target: Decoder, layer: int, count: int) -> PageCache:
    """Empty pages of a layer. Layers with a window have them too: a ring holds no whole text."""
    attention = target.config.attention(layer)
    shape = (count, _PAGE_SIZE, attention.num_kv_heads, attention.head_dim)
    return PageCache(*(jnp.zeros(shape, target.norm.weight.dtype) for _ in range(2)))


def _positions(slots: jax.Array, num_slots: int) -> jax.Array:
    """Slots [B, T] -> `Rows.at`: the label of slot p is the target's output at position p + 1."""
    text = num_slots * jnp.arange(len(slots))[:, None]
    return text + jnp.minimum(slots + 1, num_slots - 1)


def unembedding(model: Decoder) -> jax.Array:
    """The [V, D] weight that maps normed states to logits."""
    return (model.embed if model.lm_head is None else model.lm_head).weight[...]


def _teacher(head, target: Decoder, run: Run, chunk: int, at: jax.Array) -> Table:
    """The labels of rows `at` [R]: several rows share a position."""
    normed = run.normed.reshape(-1, run.normed.shape[-1])
    weight = unembedding(target)
    if head.d2t is not None:
        weight = weight[draft_ids(head)]
    weight = jax.lax.stop_gradient(weight)
    return Table(at, *tabulate(normed, weight, target.config.logit_softcap, chunk))


def student_weight(head: DraftHead, target: Decoder) -> jax.Array:
    """[V, D], of the head's logits; the target's is not trained."""
    weight = head.unembedding(target)
    return jax.lax.stop_gradient(weight) if head.lm_head is None else weight


def draft_ids(head: DraftHead) -> jax.Array:
    """Target ids [Vd] of the draft vocabulary."""
    return head.to_target_ids(jnp.arange(head.config.draft_vocab_size))


def _next_drafts(head: DraftHead, run: Run) -> tuple[jax.Array, jax.Array]:
    """The next token of every position [B * S] as a draft id, or 0; whether it has one."""
    following = _ahead(run.tokens, 1).reshape(-1)
    if head.d2t is None:
        return following, jnp.ones(following.shape, bool)
    places = jnp.full(head.config.vocab_size, -1, jnp.int32)
    places = places.at[draft_ids(head)].set(jnp.arange(head.config.draft_vocab_size))
    found = places[following]
    return jnp.maximum(found, 0), found >= 0


def _has_choice(head: DraftHead, target: Decoder, run: Run, chunk: int) -> jax.Array:
    """Whether the target's choice at every position [B * S] is in the draft vocabulary."""
    is_draft = jnp.zeros(head.config.vocab_size, bool).at[draft_ids(head)].set(True)
    choose = lambda rows: is_draft[jnp.argmax(rows @ unembedding(target).T, axis=-1)]
    return by_chunk(choose, run.normed.reshape(-1, run.normed.shape[-1]), chunk)


def compare(head, target: Decoder, run: Run, options: LossOptions, rows: Rows) -> Outcome:
    """Distils the head's rows towards the target's distributions."""
    shape, flat = rows.used.shape, lambda x: x.reshape(-1, *x.shape[2:])
    importance = flat(rows.importance)
    result = distill(
        flat(head.norm(rows.out)),
        student_weight(head, target),
        _teacher(head, target, run, options.loss_chunk, flat(rows.at)),
        importance,
        options.loss_chunk,
    )
    match = result.match
    if head.d2t is not None:
        match &= _has_choice(head, target, run, options.loss_chunk)[flat(rows.at)]
    report = (x.reshape(shape) for x in (result.kl, match))
    return Outcome(result.total, importance.sum(), *report, rows.used)


def _anchor_weights(run: Run, options: LossOptions) -> jax.Array | float:
    """Weights of the anchors [B, S], or 1 if all are equal."""
    if options.repeat_weight == 1:
        return 1.0
    return anchor_weights(run.tokens, options.repeat_weight)


def pick_anchors(run: Run, valid: jax.Array, options: LossOptions, key) -> Picked | None:
    """The anchors that are trained; None for all."""
    if options.anchors is None:
        return None
    return pick(key, valid, _anchor_weights(run, options), options.anchors)


def text_rows(
    head: DraftHead,
    target: Decoder,
    run: Run,
    valid: jax.Array,
    blocks: Blocks,
    options: LossOptions,
    picked: Picked | None = None,
) -> Rows:
    """P-EAGLE over blocks of whole texts, in one pass of the head; texts lie in the order drawn.

    All depths weigh the same; `paced` weighs them by the head's confidence.

    Returns:
      Rows [R, S], or [R, P] of the anchors in `picked`.
    """
    B, S = run.tokens.shape
    anchors = jnp.broadcast_to(jnp.arange(S), (B, S)) if picked is None else picked.slots
    slots = blocks.spread(anchors) + blocks.depth[:, None]
    num_deep, mask_id = slots[B:].size, head.config.mask_token_id
    if isinstance(head.embed, TrainedEmbed):
        tokens = MaskedRows(_ahead(run.tokens, 1).reshape(-1, 1), num_deep, mask_id)
    else:
        tokens = jnp.pad(_ahead(run.tokens, 1).reshape(-1), (0, num_deep), constant_values=mask_id)
        tokens = tokens[:, None]
    fused = head.fuse(run.taps)
    masked = head.fuse(head.mask_hidden[...])[None, None]
    masked = jnp.broadcast_to(masked, (*slots[B:].shape, fused.shape[-1]))
    positions = jnp.concatenate([jnp.tile(jnp.arange(S), B), slots[B:].reshape(-1)])[:, None]
    cache = [None] * head.config.num_layers
    attend = TextAttention(blocks, picked)
    hidden = jnp.concatenate([x.reshape(-1, 1, x.shape[-1]) for x in (fused, masked)])
    out, _ = head(target, tokens, hidden, positions, cache, attend)
    context, deep = jnp.split(out[:, 0], [B * S])
    context = context.reshape(B, S, -1)
    # Deep drafts of a text's last anchors lie past its end.
    used = blocks.spread(valid) & blocks.ahead(valid)
    weight = blocks.spread(jnp.broadcast_to(_anchor_weights(run, options), (B, S)))
    if picked is not None:
        context = narrowed(context, *picked)
        used, weight = (
            jnp.take_along_axis(x, blocks.spread(anchors), axis=1) for x in (used, weight)
        )
    out = jnp.concatenate([context, deep.reshape(-1, *context.shape[1:])])
    text = S * blocks.spread(jnp.arange(B))[:, None]
    at = text + jnp.minimum(slots + 1, S - 1)
    return Rows(out, at, used, used * weight)


def paced(head, target, run: Run, blocks: Blocks, chunk: int, rows: Rows) -> Rows:
    """The rows with D-PACE weights, from the head's probabilities of the text's tokens."""
    (token, exists), at = _next_drafts(head, run), rows.at.reshape(-1)
    probs = label_probabilities(
        jax.lax.stop_gradient(head.norm(rows.out).reshape(-1, rows.out.shape[-1])),
        jax.lax.stop_gradient(student_weight(head, target)),
        token[at],
        chunk,
    )
    probs = jnp.where(exists[at], probs, 0.0)
    by_depth = blocks.split(probs.reshape(rows.used.shape)), blocks.split(rows.used)
    return rows._replace(importance=rows.importance * jnp.concatenate(pace_weights(*by_depth)))


def unrolled_rows(
    head: DraftHead,
    target: Decoder,
    run: Run,
    valid: jax.Array,
    options: LossOptions,
    picked: Picked | None = None,
) -> Rows:
    """EAGLE-3's training-time test: row a of step s sits at slot a + s and is fed step s-1's row a.

    Step 0 is the context and has all slots. With `picked` later steps have these anchors only, and
    the result has [B, num_depths * P] instead of [B, num_depths * S] rows.
    """
    S = run.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(S), run.tokens.shape)
    anchors = positions if picked is None else picked.slots
    chosen = lambda x: x if picked is None else jnp.take_along_axis(x, anchors, axis=1)
    attend = UnrolledAttention(anchors)
    weight = chosen(jnp.broadcast_to(_anchor_weights(run, options), positions.shape))
    cache = [None] * head.config.num_layers
    out, cache = head(target, _ahead(run.tokens, 1), head.fuse(run.taps), positions, cache, attend)
    if picked is not None:
        out = narrowed(out, *picked)
    outs, at, used, importance = [out], [], [], []
    for s in range(options.num_depths):
        if s:
            shifted, hidden = chosen(_ahead(run.tokens, s + 1)), head.feedback(outs[-1])
            out, cache = head(target, shifted, hidden, anchors + s, cache, attend)
            outs.append(out)
        at.append(_positions(anchors + s, S))
        used.append(chosen(valid & _ahead(valid, s)))
        importance.append((used[-1] * _STEP_DECAY**s * weight).astype(jnp.float32))
    return Rows(*(jnp.concatenate(x, axis=1) for x in (outs, at, used, importance)))


def block_rows(
    head: BlockHead,
    target: Decoder,
    run: Run,
    valid: jax.Array,
    options: LossOptions,
    picked: Picked | None = None,
) -> Rows:
    """A block drafter over a block behind each anchor: Rows [B, num_depths * P], depth by depth.

    Raises:
      ConfigError: the head has parts that are not trained here.
    """
    if head.markov_before is not None:
        raise ConfigError("heads with a Markov head are not trained")
    (B, S), K = run.tokens.shape, options.num_depths
    slots = jnp.broadcast_to(jnp.arange(S), (B, S)) if picked is None else picked.slots
    chosen = lambda x: x if picked is None else jnp.take_along_axis(x, slots, axis=1)
    newest = chosen(_ahead(run.tokens, 1)).reshape(-1, 1)
    masks = K - head.config.block.drafts_from_newest
    tokens = jnp.pad(newest, ((0, 0), (0, masks)), constant_values=head.config.mask_token_id)
    cache = [None] * head.config.num_layers
    out, _ = head(target, tokens, head.context(run.taps), cache, TextBlocks(slots, picked))
    out = jnp.moveaxis(out[:, -K:].reshape(B, -1, K, out.shape[-1]), 2, 1)  # [B, K, P, D]
    weight = chosen(jnp.broadcast_to(_anchor_weights(run, options), (B, S)))
    at = [_positions(slots + d, S) for d in range(K)]
    used = [chosen(valid & _ahead(valid, d)) for d in range(K)]
    importance = [u * math.exp(-d / _BLOCK_DECAY) * weight for d, u in enumerate(used)]
    join = lambda parts: jnp.concatenate(parts, axis=1)
    importance = join(importance).astype(jnp.float32)
    return Rows(out.reshape(B, -1, out.shape[-1]), join(at), join(used), importance)
