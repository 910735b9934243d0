"""Training of draft heads against a frozen target that runs in the same step.

Element (a, d), slot p = a + d, drafts x_{p+2}; what it should say is the target's own output at
position p + 1. P-EAGLE trains all sampled elements in one pass; EAGLE-3 unrolls its own feedback.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.checkpoint.head_json import check_fit
from peagle_jax.config import ConfigError, DrafterConfig
from peagle_jax.drafter import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.training import attention, cod
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.objective import Distribution, Loss, distill
from peagle_jax.training.partition import deal, sum_over
from peagle_jax.training.target import unembedding
from peagle_jax.training.trainer import Params, RunConfig, Task, cast, split_model


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What a head is trained on and how. `num_depths` is K_train (EAGLE-3: unrolled steps)."""

    continuations: Path
    batch: int
    num_depths: int
    rate: float
    min_rate: float
    step_decay: float  # depth d (EAGLE-3: unrolled step d) weighs step_decay**d
    freeze_lm_head: bool
    dtype: str
    attention: attention.Backend
    query_chunk: int | None
    loss_chunk: int
    eval_sequences: int
    num_draft: int  # J of the simulated acceptance length
    loss: Loss = "kl"
    sharpen: float = 1.0  # temperature of the labels
    segments: int = 1  # P-EAGLE: pieces of a text's elements; less memory

    def __post_init__(self):
        if not (0 < self.rate <= 1 and 0 <= self.min_rate <= 1):
            raise ConfigError("--rate and --min-rate are shares, between 0 and 1")
        if self.sharpen <= 0 or self.step_decay < 0:
            raise ConfigError("--sharpen must be above 0, weights of depths not below it")
        if min(self.num_depths, self.num_draft, self.batch, self.segments) < 1:
            raise ConfigError("--depths, --num-draft, --batch and --segments must be at least 1")


class Text(NamedTuple):
    """A batch of continuations: tokens 0..prompt-1 were given, prompt..length-1 generated."""

    tokens: jax.Array  # [B, S]
    prompt: jax.Array  # [B] int32
    length: jax.Array  # [B] int32


class Outcome(NamedTuple):
    """Per-row results of a head, rows flattened from [B, T]."""

    total: jax.Array
    kl: jax.Array
    match: jax.Array
    used: jax.Array


def slot_is_trained(text: Text) -> jax.Array:
    """Slots [B, S] whose draft matters: x_{p+1} was generated and x_{p+2} exists.

    With a prompt of 3 tokens and 6 in all, slots 2 and 3 (the first two the engine would draft from).
    """
    p = jnp.arange(text.tokens.shape[1])
    return (p + 1 >= text.prompt[:, None]) & (p + 2 <= text.length[:, None] - 1)


def _ahead(x: jax.Array, d: int) -> jax.Array:
    """x [B, S, ...] at position p + d, zero past the end."""
    return jnp.pad(x[:, d:], [(0, 0), (0, d)] + [(0, 0)] * (x.ndim - 2))


def _take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, S, D], index [B, T] -> [B, T, D]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


class Run(NamedTuple):
    """The target's pass over a batch."""

    tokens: jax.Array  # [B, S] int32
    taps: jax.Array  # [B, S, A*D]
    normed: jax.Array  # [B, S, D], input of the unembedding


def run_target(target: Decoder, text: Text, taps: tuple[int, ...], backend) -> Run:
    tokens = text.tokens.astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = [None] * target.config.num_layers
    hidden, tapped, _ = target(tokens, positions, cache, attention.causal(backend), taps=taps)
    return jax.tree.map(jax.lax.stop_gradient, Run(tokens, tapped, target.norm(hidden)))


def _compare(head, target, options, out, labels, used, importance) -> Outcome:
    """Distils rows out [B, T, D] towards the target's normed states labels [B, T, Dt]."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    weight = jax.lax.stop_gradient(unembedding(target))
    teacher = Distribution(flat(labels), weight, options.sharpen)
    importance = flat(importance.astype(jnp.float32))
    student = flat(head.norm(out)), head.lm_head.weight[...]
    result = distill(*student, teacher, importance, options.loss_chunk, options.loss)
    return Outcome(result.total, result.kl, result.match, flat(used))


def parallel_outcome(
    head: DraftHead, target: Decoder, run: Run, elements: cod.Elements, options: DrafterOptions
) -> Outcome:
    """P-EAGLE over the sampled elements, in one pass of the head."""
    B, S = run.tokens.shape
    T = elements.anchor.shape[1]
    mask_id = jnp.full((B, T - S), head.config.mask_token_id)
    tokens = jnp.concatenate([_ahead(run.tokens, 1), mask_id], axis=1)
    fused = head.fuse(run.taps)
    mask_state = jnp.broadcast_to(head.fuse(head.mask_hidden[...]), (B, T - S, fused.shape[-1]))
    hidden = jnp.concatenate([fused, mask_state], axis=1)
    attend = attention.ElementAttention(elements, options.attention, options.query_chunk)
    cache = [None] * head.config.num_layers
    out, _ = head(target, tokens, hidden, elements.slots, cache, attend)
    labels = _take_rows(run.normed, jnp.minimum(elements.slots + 1, S - 1))
    importance = elements.used * options.step_decay**elements.depth
    return _compare(head, target, options, out, labels, elements.used, importance)


def _deep_outcome(options: DrafterOptions, shared, constants, piece: cod.Elements):
    """Elements of depths 1.. on top of the context's keys: (total, the rest of an `Outcome`)."""
    (head, context), (target, normed) = shared, constants
    S = piece.num_slots
    slots, used = piece.slots[:, S:], piece.used[:, S:]
    tokens = jnp.full(slots.shape, head.config.mask_token_id)
    mask_state = head.fuse(head.mask_hidden[...])
    hidden = jnp.broadcast_to(mask_state, (*slots.shape, mask_state.shape[-1]))
    attend = attention.ElementAttention(piece, options.attention, options.query_chunk)
    out, _ = head(target, tokens, hidden, slots, context, attend)
    labels = _take_rows(normed, jnp.minimum(slots + 1, S - 1))
    importance = used * options.step_decay ** piece.depth[S:]
    total, *report = _compare(head, target, options, out, labels, used, importance)
    return total, report


def partitioned_outcome(
    head: DraftHead, target: Decoder, run: Run, elements: cod.Elements, options: DrafterOptions
) -> tuple[Outcome, np.ndarray]:
    """`parallel_outcome` in `options.segments` pieces after the context; also the depth of each row."""
    B, S = run.tokens.shape
    attend = attention.UnrolledAttention(options.attention)
    cache = [None] * head.config.num_layers
    shifted, positions = _ahead(run.tokens, 1), elements.slots[:, :S]
    out, cache = head(target, shifted, head.fuse(run.taps), positions, cache, attend)
    used = elements.used[:, :S]
    first = _compare(head, target, options, out, _ahead(run.normed, 1), used, used)
    pieces = deal(elements, options.segments)
    context = [keys for (keys,) in cache]
    total, deep = sum_over(
        partial(_deep_outcome, options), (head, context), (target, run.normed), pieces
    )

    def rows(context, pieces):  # [B*S], [P, B*R] -> [B*(S + P*R)]
        pieces = jnp.moveaxis(pieces.reshape(options.segments, B, -1), 0, 1)
        return jnp.concatenate([context.reshape(B, S), pieces.reshape(B, -1)], axis=1).reshape(-1)

    depth = np.concatenate([pieces.depth[:S], np.tile(pieces.depth[S:], options.segments)])
    return Outcome(first.total + total, *map(rows, first[1:], deep)), depth


def unrolled_outcome(
    head: DraftHead, target: Decoder, run: Run, valid: jax.Array, options: DrafterOptions
) -> Outcome:
    """EAGLE-3's training-time test: row a of step s sits at slot a + s and is fed step s-1's row a."""
    S = run.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(S), run.tokens.shape)
    attend = attention.UnrolledAttention(options.attention, options.query_chunk)
    hidden, cache = head.fuse(run.taps), [None] * head.config.num_layers
    outs, labels, used, importance = [], [], [], []
    for s in range(options.num_depths):
        shifted = _ahead(run.tokens, s + 1)
        out, cache = head(target, shifted, hidden, positions + s, cache, attend)
        outs.append(out)
        labels.append(_ahead(run.normed, s + 1))
        used.append(valid & _ahead(valid, s))
        importance.append(used[-1] * options.step_decay**s)
        hidden = head.feedback(out)
    join = partial(jnp.concatenate, axis=1)
    return _compare(head, target, options, join(outs), join(labels), join(used), join(importance))


def _by_depth(outcome: Outcome, depth: np.ndarray, batch: int) -> dict:
    """Accuracy and KL per depth as (numerator, denominator) arrays [num_depths]."""
    used = outcome.used.astype(jnp.float32)
    sums = lambda x: jax.ops.segment_sum(
        x.reshape(batch, -1).sum(0), jnp.asarray(depth), int(depth.max()) + 1
    )
    count = sums(used)
    return dict(accuracy=(sums(outcome.match * used), count), kl=(sums(outcome.kl * used), count))


def head_loss(merge, frozen, taps, options: DrafterOptions, params, target: Decoder, text, key):
    """The training loss of either method; see `trainer.Task`."""
    head = merge(cast({**frozen, **params}, options.dtype))
    run = run_target(target, text, taps, options.attention)
    valid = slot_is_trained(text)
    B, S = valid.shape
    if head.config.method == "peagle":
        elements = cod.sample_elements(
            key,
            valid,
            num_depths=options.num_depths,
            rate=options.rate,
            min_rate=options.min_rate,
        )
        if options.segments > 1 and elements.sizes:
            outcome, depth = partitioned_outcome(head, target, run, elements, options)
        else:
            outcome = parallel_outcome(head, target, run, elements, options)
            depth = elements.depth
    else:
        outcome = unrolled_outcome(head, target, run, valid, options)
        depth = np.repeat(np.arange(options.num_depths), S)
    count = (outcome.used * np.tile(options.step_decay**depth, B)).sum()
    return outcome.total, (count.astype(jnp.float32), _by_depth(outcome, depth, B))


def evaluate_rows(merge, frozen, taps, options: DrafterOptions, params, target: Decoder, text):
    """Every anchor at every depth: (match, used, kl), each [B, num_depths, S]."""
    options = replace(options, loss="kl", sharpen=1.0)  # whatever was trained, one measure
    head = merge(cast({**frozen, **params}, options.dtype))
    run = run_target(target, text, taps, options.attention)
    valid = slot_is_trained(text)
    B, S = valid.shape
    if head.config.method == "peagle":
        elements = cod.all_elements(valid, options.num_depths)
        outcome = parallel_outcome(head, target, run, elements, options)
    else:
        outcome = unrolled_outcome(head, target, run, valid, options)
    shape = (B, options.num_depths, S)
    return tuple(x.reshape(shape) for x in (outcome.match, outcome.used, outcome.kl))


def acceptance_length(
    match: np.ndarray, prompt: np.ndarray, length: np.ndarray, num_draft: int
) -> float:
    """Tokens per round if these greedy texts were decoded with the head.

    A round at slot a emits the leading run of right drafts and one more token. Texts are walked from
    their first slot, prompt - 1, as the engine would.

    Args:
      match: [B, depths, S] bool, the draft of anchor a at depth d equals the target's choice.
    """
    run = np.cumprod(match[:, :num_draft], axis=1).sum(axis=1)  # [B, S]
    emitted = rounds = 0
    for row, first, last in zip(run, prompt - 1, length - 3, strict=True):
        slot = first
        while slot <= last:
            gained = min(int(row[slot]), last - slot) + 1
            emitted, rounds, slot = emitted + gained, rounds + 1, slot + gained
    return emitted / max(rounds, 1)


def load_text(folder: Path, name: str) -> Text:
    """`{name}.npz` as written by `continuations`."""
    with np.load(folder / f"{name}.npz") as file:
        return Text(file["tokens"], file["prompt"], file["length"])


def init_head(config: DrafterConfig, target: Decoder, seed: int) -> DraftHead:
    """A random head that starts from the target's embedding, unembedding and final norm."""
    if config.draft_vocab_size != config.vocab_size or not config.own_lm_head:
        raise ConfigError("training keeps the full vocabulary and an lm_head of the head's own")
    if config.hidden_size != target.config.hidden_size:
        raise ConfigError("the head must be as wide as the target: it starts from its embedding")
    check_fit(config, target.config, config.num_taps * config.target_hidden_size, "peagle-train")
    head = DraftHead(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    if head.embed is not None:
        head.embed.weight[...] = target.embed.weight[...].astype(jnp.float32)
        head.embed = TrainedEmbed(head.embed)
    head.lm_head.weight[...] = unembedding(target).astype(jnp.float32)
    head.norm.weight[...] = target.norm.weight[...].astype(jnp.float32)
    return head


def warm_start(params: Params, trained: Params) -> Params:
    """The weights of a trained head, its MLPs widened to those of `params`; the function is unchanged.

    New inner units start with the fresh gates of `params` and columns of zeros in `down`.
    """
    if params.keys() != trained.keys():
        raise ConfigError(f"--init has other weights: {sorted(params.keys() ^ trained.keys())[:4]}")
    widened = {}
    for name, fresh in params.items():
        old = trained[name].astype(fresh.dtype)
        if name.endswith(("mlp.gate_up.weight", "mlp.gate_up.bias")) and len(old) < len(fresh):
            halves = zip(jnp.split(old, 2), jnp.split(fresh, 2), strict=True)
            old = jnp.concatenate([x for o, f in halves for x in (o, f[len(o) :])])
        elif name.endswith("mlp.down.weight") and old.shape[1] < fresh.shape[1]:
            old = jnp.pad(old, ((0, 0), (0, fresh.shape[1] - old.shape[1])))
        if old.shape != fresh.shape:
            raise ConfigError(f"--init has {name} of {old.shape}, the new head of {fresh.shape}")
        widened[name] = old
    return widened


def make_task(
    config: DrafterConfig,
    target: Decoder,
    options: DrafterOptions,
    run: RunConfig,
    init: DraftHead | None = None,
) -> tuple[Task, object]:
    """The task, and the function that turns its parameters into a head; `init` is a head to start from."""
    if options.segments > 1 and config.method != "peagle":
        raise ConfigError("--segments cuts the elements of P-EAGLE; EAGLE-3 has none")
    text, heldout = (load_text(options.continuations, n) for n in ("train", "heldout"))
    params, merge = split_model(init_head(config, target, run.seed))
    if init is not None:
        params = warm_start(params, split_model(init)[0])
    frozen = {}
    if options.freeze_lm_head:
        frozen = {n: p for n, p in params.items() if n.startswith("lm_head.")}
        params = {n: p for n, p in params.items() if n not in frozen}
    taps = config.taps or target.config.default_taps
    weights, merge_target = split_model(target)
    weights = cast(weights, options.dtype)
    rows = len(text.tokens)
    if rows < options.batch:
        raise ConfigError(f"{rows} continuations are fewer than --batch {options.batch}")

    def batch(step: int) -> Text:
        per_epoch = rows // options.batch
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((run.seed, epoch)).permutation(rows)
        chosen = np.sort(order[at * options.batch : (at + 1) * options.batch])
        return Text(*(x[chosen] for x in text))

    def loss(params, weights, text, key):
        return head_loss(merge, frozen, taps, options, params, merge_target(weights), text, key)

    @jax.jit
    def evaluate_batch(params, weights, text):
        return evaluate_rows(merge, frozen, taps, options, params, merge_target(weights), text)

    size = max(1, options.batch // 4)
    count = min(options.eval_sequences, len(heldout.tokens)) // size * size
    if count == 0:
        raise ConfigError(f"fewer than {size} held-out continuations; lower --batch")

    def evaluate(params):
        parts = []
        for i in range(0, count, size):
            piece = Text(*(x[i : i + size] for x in heldout))
            parts.append(jax.device_get(evaluate_batch(params, weights, piece)))
        match, used, kl = (np.concatenate(x) for x in zip(*parts, strict=True))
        per_depth = lambda x: (x * used).sum((0, 2)) / np.maximum(used.sum((0, 2)), 1)
        return dict(
            loss=float((kl * used).sum() / max(used.sum(), 1)),
            acceptance_length=acceptance_length(
                match & used, heldout.prompt[:count], heldout.length[:count], options.num_draft
            ),
            accuracy=per_depth(match),
        )

    task = Task(
        params=params,
        loss=loss,
        constants=weights,
        batch=batch,
        evaluate=evaluate,
        tokens_per_step=options.batch * text.tokens.shape[1],
    )
    return task, lambda params: merge({**frozen, **params})
