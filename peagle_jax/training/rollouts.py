"""A head that follows its target while the target learns: one step of training on texts that the
engine has just written.

    state = drafter_state(head, learning_rate=1e-3)
    state, report = drafter_step(state, Rollouts(target, texts_of(completions, length)))
    engine.update_weights(target, head=head_of(state))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.engine.host.completion import Completion
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.models.weight_order import in_rows
from peagle_jax.training.drafter import head_loss
from peagle_jax.training.embedding import TrainedEmbed
from peagle_jax.training.passes import LossOptions
from peagle_jax.training.recipe import loss_chunk
from peagle_jax.training.stored_text import Text
from peagle_jax.training.trainer import (
    Params,
    UpdateConfig,
    cast,
    make_optimizer,
    make_step,
    split_model,
)

_DEPTHS = 8
"""Of a head whose config does not say for how many drafts it was trained."""


class Rollouts(NamedTuple):
    """A batch: texts, and the target that wrote them. Batches of one shape compile once."""

    target: Decoder
    text: Text


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrafterState:
    """A head in training."""

    params: Params  # float32 masters
    kept: Params  # what a step leaves alone: the selector
    opt_state: Any
    step: jax.Array  # [] int32, number of updates
    update: Callable = field(metadata=dict(static=True))
    head: Callable[[Params], DraftHead] = field(metadata=dict(static=True))


def drafter_state(
    head: DraftHead,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    microbatches: int = 1,
    seed: int = 0,
) -> DrafterState:
    """The state before the first step; the head's arrays are copied.

    Args:
      head: on one device, an engine's own or one that was loaded; products are computed in the
        dtype of its weights.
      learning_rate: of Muon for its inner matrices; two thirds of it for tables and vectors.
      weight_decay, microbatches, seed: as of `trainer.UpdateConfig`.
    """
    dtype = head.norm.weight.dtype
    trained = in_rows(head)
    if trained.embed is not None:
        trained.embed = TrainedEmbed(trained.embed)
    weights, merge = split_model(trained)
    masters = {name: jnp.array(leaf, jnp.float32) for name, leaf in weights.items()}
    is_kept = lambda name: name.startswith("selector.")
    params = {name: leaf for name, leaf in masters.items() if not is_kept(name)}
    config = UpdateConfig(
        optimizer="muon",
        learning_rate=learning_rate,
        adam_learning_rate=learning_rate * 2 / 3,
        weight_decay=weight_decay,
        clip=1.0,
        microbatches=microbatches,
        seed=seed,
    )
    optimizer = make_optimizer(config, params)
    options = LossOptions(
        num_depths=head.config.trained_num_draft or _DEPTHS,
        dtype=dtype,
        loss_chunk=loss_chunk(head.config.vocab_size),
    )
    return DrafterState(
        params=params,
        kept={name: leaf for name, leaf in masters.items() if is_kept(name)},
        opt_state=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        update=make_step(partial(_loss, merge, options), config, optimizer),
        head=lambda params: merge(cast(params, dtype)),
    )


def _loss(merge, options: LossOptions, params: Params, constants, text: Text, key):
    """`head_loss` with the weights that are not trained; half of the anchors of a row are."""
    target, kept = in_rows(constants[0]), constants[1]
    taps = merge(params | kept).config.taps or target.config.default_taps
    options = replace(options, anchors=text.tokens.shape[1] // 2)
    whole = lambda params: merge(params | cast(kept, options.dtype))
    return head_loss(whole, taps, options, params, target, text, key)


def drafter_step(state: DrafterState, batch: Rollouts) -> tuple[DrafterState, dict]:
    """One update of a head on texts of its target: the step of `peagle-train head`.

    Args:
      state: consumed.
      batch: the target's arrays are read only.
    Returns:
      The next state, and a report: {name: (sum, count)}, device arrays, for the loss (KL to the
      target) and by depth for accuracy and KL.
    """
    params, opt_state, report = state.update(
        state.params,
        state.opt_state,
        (batch.target, state.kept),
        batch.text,
        state.step,
        np.float32(1),
    )
    return replace(state, params=params, opt_state=opt_state, step=state.step + 1), report


def head_of(state: DrafterState) -> DraftHead:
    """The head in its dtype, for `Engine.update_weights(head=...)`."""
    return state.head(state.params | state.kept)


def texts_of(completions: Sequence[Completion], length: int) -> Text:
    """Prompts and answers as rows [n, length], cut or padded."""
    rows = np.zeros((len(completions), length), np.int32)
    ends = [min(length, len(one.prompt) + len(one.tokens)) for one in completions]
    for row, one, end in zip(rows, completions, ends, strict=True):
        row[:end] = (one.prompt + one.tokens)[:end]
    prompts = [min(length, len(one.prompt)) for one in completions]
    return Text(rows, np.array(prompts, np.int32), np.array(ends, np.int32))
