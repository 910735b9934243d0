"""Training of draft heads against a frozen target that runs in the same step."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from peagle_jax.checkpoint.head_json import check_fit
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.method.block_head import make_head
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.training.acceptance import lengths
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.passes import (
    HeadOptions,
    LossOptions,
    Outcome,
    Rows,
    Run,
    block_rows,
    compare,
    paced,
    pick_anchors,
    run_target,
    slot_is_trained,
    text_rows,
    unembedding,
    unrolled_rows,
)
from peagle_jax.training.stored_text import Text, batches, held_out, load_text, rows_of
from peagle_jax.training.texts import Blocks, blocks_of
from peagle_jax.training.trainer import RunConfig, Task, cast, split_model


def _by_depth(outcome: Outcome, depth: np.ndarray) -> dict:
    """Accuracy and KL per depth as (numerator, denominator) arrays [num_depths].

    Args:
      depth: of rows [A, T], as [A, 1] or [1, T].
    """
    used = outcome.used.astype(jnp.float32)
    of_rows, num_depths = jnp.asarray(depth.reshape(-1)), int(depth.max()) + 1
    other = depth.shape.index(1)
    sums = lambda x: jax.ops.segment_sum(x.sum(other), of_rows, num_depths)
    count = sums(used)
    return dict(accuracy=(sums(outcome.match * used), count), kl=(sums(outcome.kl * used), count))


def _parallel_rows(head, target, text: Text, taps, options: LossOptions, key):
    """P-EAGLE: (the target's run, trained rows, their depths [R, 1])."""
    # The first texts are trained to the greatest depth: shuffle them.
    key, shuffle = jax.random.split(key)
    text = rows_of(text, jax.random.permutation(shuffle, len(text.tokens)))
    run, valid = run_target(target, text, taps), slot_is_trained(text)
    blocks = blocks_of(len(valid), options.num_depths)
    picked = pick_anchors(run, valid, options, key)
    rows = text_rows(head, target, run, valid, blocks, options, picked)
    rows = paced(head, target, run, blocks, options.loss_chunk, rows)
    return run, rows, blocks.depth[:, None]


def _rows_of_texts(head, target, text: Text, taps, options: LossOptions, key):
    """EAGLE-3 and DFlash: (the target's run, trained rows, their depths [1, T])."""
    run, valid = run_target(target, text, taps), slot_is_trained(text)
    picked = pick_anchors(run, valid, options, key)
    make = unrolled_rows if head.config.block is None else block_rows
    rows = make(head, target, run, valid, options, picked)
    depth = np.repeat(np.arange(options.num_depths), rows.at.shape[1] // options.num_depths)
    return run, rows, depth[None]


def head_loss(merge, taps, options: LossOptions, params, target: Decoder, text, key):
    """The training loss of a head of any method; see `trainer.Task`."""
    head = merge(cast(params, options.dtype))
    trained_rows = _parallel_rows if head.config.method == "peagle" else _rows_of_texts
    run, rows, depth = trained_rows(head, target, text, taps, options, key)
    outcome = compare(head, target, run, options, rows)
    return outcome.total, (outcome.count, _by_depth(outcome, depth))


def all_rows(head, target: Decoder, run: Run, valid, options: LossOptions) -> Rows:
    """Every anchor at every depth, [B, num_depths * S]; `used` where the engine could draft."""
    B, S = valid.shape
    if head.config.method != "peagle":
        make = unrolled_rows if head.config.block is None else block_rows
        return make(head, target, run, valid, options)
    rows = text_rows(head, target, run, valid, Blocks((B,) * options.num_depths), options)
    by_text = lambda x: jnp.moveaxis(x.reshape(-1, B, *x.shape[1:]), 0, 1)
    return Rows(*(by_text(x).reshape(B, -1, *x.shape[2:]) for x in rows))


def evaluate_rows(merge, taps, options: LossOptions, params, target: Decoder, text):
    """Every anchor at every depth: (match, used, kl), each [B, num_depths, S]."""
    head = merge(cast(params, options.dtype))
    run = run_target(target, text, taps)
    valid = slot_is_trained(text)
    rows = all_rows(head, target, run, valid, options)
    outcome = compare(head, target, run, options, rows)
    shape = (len(valid), options.num_depths, -1)
    return tuple(x.reshape(shape) for x in (outcome.match, outcome.used, outcome.kl))


def init_head(
    config: DrafterConfig, target: Decoder, seed: int, draft_ids: np.ndarray | None = None
) -> DraftHead:
    """A random head that starts from the target's embedding, unembedding and final norm.

    Its layers after the first start as the target's last ones, where `can_copy_layers`.

    Args:
      draft_ids: target ids of a smaller draft vocabulary, ascending.
    Raises:
      CheckpointError: the head does not fit the target.
    """
    if config.hidden_size != target.config.hidden_size:
        raise ConfigError("the head must be as wide as the target: it starts from its embedding")
    width = config.num_taps * config.target_hidden_size
    check_fit(config, target.config, width, "--method " + config.method)
    head = make_head(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    if head.embed is not None:
        head.embed.weight[...] = target.embed.weight[...].astype(jnp.float32)
        head.embed = TrainedEmbed(head.embed)
    if head.d2t is not None:
        head.d2t[...] = jnp.asarray(draft_ids - np.arange(len(draft_ids)), jnp.int32)
    if head.lm_head is not None:
        rows = unembedding(target)
        rows = rows if head.d2t is None else rows[draft_ids]
        head.lm_head.weight[...] = rows.astype(jnp.float32)
    head.norm.weight[...] = target.norm.weight[...].astype(jnp.float32)
    if config.qk_norm == target.config.qk_norm and can_copy_layers(config, target):
        _copy_layers(head, target)
    return head


def further_config(config: DrafterConfig, method: str) -> DrafterConfig:
    """That of a head that is trained further, without its selector, which is trained afterwards.

    Raises:
      ConfigError: it drafts by another method, or has a selector that nothing here trains.
    """
    if config.method != method:
        raise ConfigError(f"--init has a head of another method: add --method {config.method}")
    if config.selector_rank and method != "peagle":
        raise ConfigError("--init has a selector, and only those of P-EAGLE heads can be trained")
    depths = config.trained_num_draft or (8 if method == "peagle" else 7)
    return replace(config, selector_rank=0, trained_num_draft=depths)


def _leaves(layer: nnx.Module) -> dict:
    return dict(jax.tree.flatten_with_path(nnx.state(layer))[0])


def can_copy_layers(config: DrafterConfig, target: Decoder) -> bool:
    """Whether the head's layers after its first, with the target's norms, can be its last ones.

    Biases of one axis may be missing in the head; it has no place for scales and experts.
    """
    config = replace(config, qk_norm=target.config.qk_norm)
    make = lambda: make_head(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    own, given = nnx.eval_shape(make).layers, target.layers
    if not 0 < len(own) <= len(given) or target.config.family == "gemma4":
        return False
    for ours, theirs in zip(own, given[len(given) - len(own) :], strict=True):
        wanted, found = _leaves(ours), _leaves(theirs)
        more = [leaf for path, leaf in found.items() if path not in wanted]
        if any(leaf.ndim > 1 for leaf in more) or any(
            path not in found or found[path].shape != leaf.shape for path, leaf in wanted.items()
        ):
            return False
    return True


def _copy_layers(head: DraftHead, target: Decoder) -> None:
    given = target.layers[len(target.layers) - len(head.layers) :]
    for ours, theirs in zip(head.layers, given, strict=True):
        copy = lambda path, _, found: found[path].astype(jnp.float32)
        state = nnx.state(ours)
        nnx.update(ours, jax.tree.map_with_path(partial(copy, found=_leaves(theirs)), state))


def _draft_ids(config: DrafterConfig, target: TargetConfig, text: Text) -> np.ndarray | None:
    """The draft vocabulary: end tokens and the most frequent tokens of the texts; None: all."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    used = text.tokens[np.arange(text.tokens.shape[1]) < text.length[:, None]]
    counts = np.bincount(used, minlength=config.vocab_size)
    counts[list(target.eos_ids)] = len(used) + 1
    return np.sort(np.argsort(-counts, kind="stable")[: config.draft_vocab_size])


def make_task(
    config: DrafterConfig,
    target: Decoder,
    options: HeadOptions,
    run: RunConfig,
    init: DraftHead | None = None,
) -> tuple[Task, object]:
    """The task, and the function that turns its parameters into a head.

    Args:
      init: a head of this config to start from.
    Raises:
      ConfigError: the texts cannot be read, or are too few for a batch.
      CheckpointError: the head does not fit the target.
    """
    taps = config.taps or target.config.default_taps
    load = partial(load_text, target.config, options.texts, taps=taps)
    text, heldout = load("train"), load("heldout")
    if init is None:
        draft_ids = _draft_ids(config, target.config, text)
        init = init_head(config, target, run.seed, draft_ids)
    elif init.embed is not None:
        init.embed = TrainedEmbed(init.embed)
    params, merge = split_model(init)
    weights, merge_target = split_model(target)

    def loss(params, weights, text, key):
        return head_loss(merge, taps, options, params, merge_target(weights), text, key)

    @jax.jit
    def evaluate_batch(params, weights, text):
        with dispatch.references(rounded=True):  # as in training
            return evaluate_rows(merge, taps, options, params, merge_target(weights), text)

    pieces = held_out(heldout, options.batch, options.eval_sequences)

    def evaluate(params):
        parts = [jax.device_get(evaluate_batch(params, weights, piece)) for piece in pieces]
        match, used, kl = (np.concatenate(x) for x in zip(*parts, strict=True))
        accuracy = (match * used).sum((0, 2)) / np.maximum(used.sum((0, 2)), 1)
        loss = float((kl * used).sum() / max(used.sum(), 1))
        return dict(
            loss=loss, **lengths(match & used, heldout, options.num_draft), accuracy=accuracy
        )

    task = Task(
        params=params,
        loss=loss,
        constants=weights,
        batch=batches(text, options.batch, run.seed),
        evaluate=evaluate,
        tokens_per_step=options.batch * text.tokens.shape[1],
    )
    return task, merge
