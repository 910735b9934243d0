"""Training of draft heads against a frozen target that runs in the same step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import dispatch
from peagle_jax.checkpoint.head_json import check_fit
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.training import cod
from peagle_jax.training.acceptance import earlier, leading, repeats, walk
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.mask_hidden import Hidden, VariedHead
from peagle_jax.training.passes import (
    DrafterOptions,
    Outcome,
    Rows,
    Run,
    compare,
    draft_ids,
    parallel_rows,
    partitioned_outcome,
    pick_anchors,
    run_target,
    slot_is_trained,
    text_rows,
    unrolled_rows,
)
from peagle_jax.training.stored_text import Text, batches, load_text, pieces, rows_of
from peagle_jax.training.target import unembedding
from peagle_jax.training.texts import Blocks, blocks_of
from peagle_jax.training.trainer import Params, RunConfig, Task, cast, split_model


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


def _parallel_outcome(head, target, run: Run, valid, options: DrafterOptions, key):
    """P-EAGLE over freshly drawn elements: (outcome, depth of its rows)."""
    if options.elements == "texts":
        blocks = blocks_of(len(valid), options.num_depths, options.rate, options.min_rate)
        picked = pick_anchors(run, valid, options, key)
        rows = text_rows(head, target, run, valid, blocks, options, picked)
        return compare(head, target, run, options, rows), blocks.depth[:, None]
    elements = cod.sample_elements(
        key, valid, num_depths=options.num_depths, rate=options.rate, min_rate=options.min_rate
    )
    if options.segments > 1 and elements.sizes:
        outcome, depth = partitioned_outcome(head, target, run, elements, options)
        return outcome, depth[None]
    rows = parallel_rows(head, target, run, elements, options)
    return compare(head, target, run, options, rows), elements.depth[None]


def head_loss(merge, taps, options: DrafterOptions, params, target: Decoder, text, key):
    """The training loss of either method; see `trainer.Task`."""
    head = merge(cast(params, options.dtype))
    if options.elements == "texts":
        # The first texts are trained to the greatest depth: shuffle them.
        key, shuffle = jax.random.split(key)
        order = jax.random.permutation(shuffle, len(text.tokens))
        text = rows_of(text, order)
    run = run_target(target, text, taps)
    valid = slot_is_trained(text)
    if head.config.method == "peagle":
        outcome, depth = _parallel_outcome(head, target, run, valid, options, key)
    else:
        picked = pick_anchors(run, valid, options, key)
        rows = unrolled_rows(head, target, run, valid, options, picked)
        outcome = compare(head, target, run, options, rows)
        depth = np.repeat(np.arange(options.num_depths), rows.at.shape[1] // options.num_depths)
        depth = depth[None]
    return outcome.total, (outcome.count, _by_depth(outcome, depth))


def all_rows(head, target: Decoder, run: Run, valid, options: DrafterOptions) -> Rows:
    """Every anchor at every depth, rows [B, num_depths * S]; `used` where the engine could draft."""
    B, S = valid.shape
    if head.config.method == "eagle3":
        return unrolled_rows(head, target, run, valid, options)
    if options.elements == "anchors":
        elements = cod.all_elements(valid, options.num_depths)
        rows = parallel_rows(head, target, run, elements, options)
        return rows._replace(used=rows.used & jnp.tile(valid, options.num_depths))
    rows = text_rows(head, target, run, valid, Blocks((B,) * options.num_depths), options)
    by_text = lambda x: jnp.moveaxis(x.reshape(-1, B, *x.shape[1:]), 0, 1)
    return Rows(*(by_text(x).reshape(B, -1, *x.shape[2:]) for x in rows))


def evaluate_rows(merge, taps, options: DrafterOptions, params, target: Decoder, text):
    """Every anchor at every depth: (match, used, kl), each [B, num_depths, S]."""
    # The same metric for all training losses.
    options = replace(options, loss="kl", sharpen=1.0, weights="depth", repeat_weight=1.0)
    head = merge(cast(params, options.dtype))
    run = run_target(target, text, taps)
    valid = slot_is_trained(text)
    rows = all_rows(head, target, run, valid, options)
    outcome = compare(head, target, run, options, rows)
    shape = (len(valid), options.num_depths, -1)
    return tuple(x.reshape(shape) for x in (outcome.match, outcome.used, outcome.kl))


def init_head(
    config: DrafterConfig,
    target: Decoder,
    seed: int,
    *,
    from_layers: bool = False,
    hidden: Hidden = "shared",
    draft_ids: np.ndarray | None = None,
) -> DraftHead:
    """A random head that starts from the target's embedding, unembedding and final norm.

    With `from_layers` its layers after the first start as the target's last ones, in their order. `hidden`
    names the states of its mask rows. `draft_ids` are the target ids of a smaller draft vocabulary, ascending.
    """
    if config.hidden_size != target.config.hidden_size:
        raise ConfigError("the head must be as wide as the target: it starts from its embedding")
    check_fit(
        config,
        target.config,
        config.num_taps * config.target_hidden_size,
        "--method " + config.method,
    )
    make = DraftHead if hidden == "shared" else partial(VariedHead, form=hidden)
    head = make(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
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
    if from_layers:
        _copy_layers(head, target)
    return head


def _leaves(layer: nnx.Module) -> dict:
    return dict(jax.tree.flatten_with_path(nnx.state(layer))[0])


def can_copy_layers(config: DrafterConfig, target: Decoder) -> bool:
    """Whether layers of the head can start as the target's last ones: see `_copy_layers`."""
    try:
        make = lambda: DraftHead(
            replace(config, qk_norm=target.config.qk_norm), dtype=jnp.float32, rngs=nnx.Rngs(0)
        )
        _check_layers(nnx.eval_shape(make), target)
    except ConfigError:
        return False
    return True


def _check_layers(head: DraftHead, target: Decoder) -> None:
    own, given = head.layers, target.layers
    if not 0 < len(own) <= len(given):
        raise ConfigError(
            f"--from-layers: {len(own)} layers after the head's first, {len(given)} of the target"
        )
    for ours, theirs in zip(own, given[len(given) - len(own) :], strict=True):
        found = _leaves(theirs)
        same = all(
            path in found and found[path].shape == leaf.shape
            for path, leaf in _leaves(ours).items()
        )
        more = [leaf for path, leaf in found.items() if path not in _leaves(ours)]
        # What the head has no place for: biases of one axis are left out, scales and experts have more.
        if not same or any(leaf.ndim > 1 for leaf in more) or target.config.family == "gemma4":
            raise ConfigError("--from-layers: layers of this target are not built as the head's")


def _copy_layers(head: DraftHead, target: Decoder) -> None:
    """Copies the target's last layers to those of the head after its first, but for biases and sinks."""
    _check_layers(head, target)
    given = target.layers[len(target.layers) - len(head.layers) :]
    for ours, theirs in zip(head.layers, given, strict=True):
        copy = lambda path, _, found: found[path].astype(jnp.float32)
        state = nnx.state(ours)
        nnx.update(ours, jax.tree.map_with_path(partial(copy, found=_leaves(theirs)), state))


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


def _check(config: DrafterConfig, options: DrafterOptions) -> None:
    """Raises `ConfigError` for options that do not fit the method or the head."""
    if options.segments > 1 and config.method != "peagle":
        raise ConfigError("--segments cuts the elements of P-EAGLE; EAGLE-3 has none")
    if options.anchors and config.method == "peagle" and options.elements != "texts":
        raise ConfigError("--anchors picks anchors of whole texts: add --elements texts")
    if options.elements == "texts":
        if config.method != "peagle":
            raise ConfigError("--elements texts is for P-EAGLE; EAGLE-3 trains on all anchors")
        if config.sliding_windows is not None and any(config.sliding_windows):
            raise ConfigError("--elements texts has no sliding windows; use --elements anchors")


def every_nth(n: int, special: Callable, usual: Callable) -> Callable[[int], Text]:
    """Batches of `special` at every n-th step, of `usual` at the others; each goes on where it stopped."""

    def batch(step: int) -> Text:
        turn, place = divmod(step, n)
        return special(turn) if place == n - 1 else usual(step - turn)

    return batch


def training_batches(
    text: Text, options: DrafterOptions, run: RunConfig, target: TargetConfig
) -> Callable[[int], Text]:
    """Step -> texts, or as many tokens of their pieces; those of `options.long_text` at every n-th step.

    Raises:
      ConfigError: the pieces or the longer texts do not make up a step, or the longer texts have tokens
        outside of the target's vocabulary.
    """
    usual = batches(text, options.batch, run.seed)
    if options.text_length is not None:
        cut = pieces(text, options.text_length)
        size = options.batch * text.tokens.shape[1] // options.text_length
        if size > len(cut.tokens):
            raise ConfigError(f"--text-length: {len(cut.tokens)} pieces, and a step has {size}")
        usual = batches(cut, size, run.seed)
    if options.long_text is None:
        return usual
    longer = load_text(
        target, options.long_text, "train", options.max_temperature, flag="--long-text"
    )
    size = options.batch * text.tokens.shape[1] // longer.tokens.shape[1]
    if not 0 < size <= len(longer.tokens) or size % run.microbatches:
        raise ConfigError(
            f"--long-text: {size} of its {len(longer.tokens)} texts have the tokens of a step; there "
            "must be as many, at least one, and a multiple of --microbatches"
        )
    return every_nth(options.long_every, batches(longer, size, run.seed), usual)


def _draft_ids(
    config: DrafterConfig, target: TargetConfig, text: Text, init: DraftHead | None
) -> np.ndarray | None:
    """The draft vocabulary: that of `init`, or end tokens and the most frequent tokens of the texts; None: all."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    if init is not None:
        return np.asarray(draft_ids(init))
    used = text.tokens[np.arange(text.tokens.shape[1]) < text.length[:, None]]
    counts = np.bincount(used, minlength=config.vocab_size)
    counts[list(target.eos_ids)] = len(used) + 1
    return np.sort(np.argsort(-counts, kind="stable")[: config.draft_vocab_size])


def make_task(
    config: DrafterConfig,
    target: Decoder,
    options: DrafterOptions,
    run: RunConfig,
    init: DraftHead | None = None,
) -> tuple[Task, object]:
    """The task, and the function that turns its parameters into a head; `init` is a head to start from."""
    _check(config, options)
    stored = partial(load_text, target.config, options.continuations)
    text, heldout = stored("train", options.max_temperature), stored("heldout")
    made = init_head(
        config,
        target,
        run.seed,
        from_layers=options.from_layers,
        hidden=options.hidden,
        draft_ids=_draft_ids(config, target.config, text, init),
    )
    params, merge = split_model(made)
    if init is not None:
        params = warm_start(params, split_model(init)[0])
    taps = config.taps or target.config.default_taps
    weights, merge_target = split_model(target)
    rows = len(text.tokens)
    if rows < options.batch:
        raise ConfigError(f"{rows} continuations are fewer than --batch {options.batch}")

    def loss(params, weights, text, key):
        return head_loss(merge, taps, options, params, merge_target(weights), text, key)

    @jax.jit
    def evaluate_batch(params, weights, text):
        with dispatch.references(rounded=True):  # as in training
            return evaluate_rows(merge, taps, options, params, merge_target(weights), text)

    size = max(1, options.batch // 4)
    count = min(options.eval_sequences, len(heldout.tokens)) // size * size
    if count == 0:
        raise ConfigError(f"fewer than {size} held-out continuations; lower --batch")

    seen = repeats([earlier(row) for row in heldout.tokens[:count]], text.tokens.shape[1])

    def evaluate(params):
        parts = []
        for i in range(0, count, size):
            piece = rows_of(heldout, slice(i, i + size))
            parts.append(jax.device_get(evaluate_batch(params, weights, piece)))
        match, used, kl = (np.concatenate(x) for x in zip(*parts, strict=True))
        per_depth = lambda x: (x * used).sum((0, 2)) / np.maximum(used.sum((0, 2)), 1)
        run = leading(match & used, options.num_draft)
        rounds = walk(run, heldout.prompt[:count], heldout.length[:count])
        fresh = rounds.take(~seen[rounds.text, rounds.slot])
        return dict(
            loss=float((kl * used).sum() / max(used.sum(), 1)),
            acceptance_length=rounds.acceptance_length,
            fresh_acceptance_length=fresh.acceptance_length,
            accuracy=per_depth(match),
        )

    task = Task(
        params=params,
        loss=loss,
        constants=weights,
        batch=training_batches(text, options, run, target.config),
        evaluate=evaluate,
        tokens_per_step=options.batch * text.tokens.shape[1],
    )
    return task, lambda params: merge(params)
