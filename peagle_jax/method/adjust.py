"""Sampling controls that change the target's logits: masks, bias, minimum length and penalties.

They are part of the target's law, so speculative decoding stays lossless: row j of a round is
adjusted for the text that ends in its drafts d_1..d_j, and a forbidden draft has probability 0. The
controls of a slot are device state, filled once at admission by `fill`, because only the device
knows the tokens of the calls in flight. docs/serving.md has the definitions and their order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.method.plan import ControlsPlan, RequestParams
from peagle_jax.parallel import vocabulary
from peagle_jax.sampling_params import MAX_BIAS, MAX_END_IDS

_MOST = 2**15 - 256
"""Counts of a token stop here: no penalty needs more, and the tokens of a round still fit into
int16."""


class Controls(NamedTuple):
    """Controls of each of S slots. They hold where `RequestParams.adjusts` is set; other slots may
    be stale."""

    # [S, MAX_BIAS] int32, tokens with a bias of their own; out of range: no entry
    bias_ids: jax.Array
    bias: jax.Array  # [S, MAX_BIAS] float32, -inf forbids the token
    # [S] float32, bias of all other tokens: 0, or -inf where only the listed are allowed
    base: jax.Array
    end_ids: jax.Array  # [S, MAX_END_IDS] int32, tokens that end the text; out of range: no entry
    min_end: jax.Array  # [S] int32, first position at which they are allowed
    repetition: jax.Array  # [S] float32, 1 for none
    frequency: jax.Array  # [S] float32, 0 for none
    presence: jax.Array  # [S] float32, 0 for none
    counts: jax.Array  # [S, V] int16, how often each token was generated
    in_prompt: jax.Array  # [S, V] bool


class Adjustments(NamedTuple):
    """Inputs of `adjusted` for one call."""

    controls: Controls  # of all slots
    slots: jax.Array  # [B] int32
    constrained: jax.Array  # [B] int32, 1: the row's mask holds
    mask: jax.Array | None  # [B, T, mask_words(V)] int32, see `plan`; None if no row is constrained

    @classmethod
    def of(cls, controls: Controls | None, slots, constrained, mask) -> "Adjustments | None":
        """None without controls."""
        return None if controls is None else cls(controls, slots, constrained, mask)

    def wanted(self, params: RequestParams) -> jax.Array:
        """[B] bool: whether a row's logits are adjusted."""
        return (params.adjusts > 0) | (self.constrained > 0)


def init_controls(num_slots: int, vocab_size: int) -> Controls:
    """Controls without effect."""
    S = num_slots
    full = lambda value, dtype, *shape: jnp.full((S, *shape), value, dtype)
    return Controls(
        bias_ids=full(vocab_size, jnp.int32, MAX_BIAS),
        bias=full(0, jnp.float32, MAX_BIAS),
        base=full(0, jnp.float32),
        end_ids=full(vocab_size, jnp.int32, MAX_END_IDS),
        min_end=full(0, jnp.int32),
        repetition=full(1, jnp.float32),
        frequency=full(0, jnp.float32),
        presence=full(0, jnp.float32),
        counts=full(0, jnp.int16, vocab_size),
        in_prompt=full(False, jnp.bool, vocab_size),
    )


def slot_bytes(vocab_size: int) -> int:
    """Bytes of the controls of one slot."""
    return 3 * vocab_size + 8 * MAX_BIAS + 4 * MAX_END_IDS + 5 * 4


def fill(controls: Controls, plan: ControlsPlan) -> Controls:
    """Writes the controls of one slot and counts its tokens anew, at each admission of a request
    that has some."""
    place, V = jnp.arange(plan.tokens.shape[0]), controls.counts.shape[1]
    at = lambda chosen: jnp.where(chosen, plan.tokens, V)  # V is out of range: dropped
    output = at((place >= plan.num_prompt) & (place < plan.num_tokens))
    counts = jnp.zeros(V, jnp.int32).at[output].add(1, mode="drop")
    new = Controls(
        **{name: getattr(plan, name) for name in Controls._fields if name in plan._fields},
        counts=jnp.minimum(counts, _MOST).astype(jnp.int16),
        in_prompt=jnp.zeros(V, jnp.bool).at[at(place < plan.num_prompt)].set(True, mode="drop"),
    )
    return jax.tree.map(lambda all_, row: all_.at[plan.slot].set(row), controls, new)


def count_tokens(
    controls: Controls | None,
    slots: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    adjusts: jax.Array | None,
) -> Controls | None:
    """Counts the first `count` [B] of the emitted `tokens` [B, T] in rows whose `adjusts` [B] is
    set.

    Without controls there is nothing to count.
    """
    if controls is None:
        return None
    T, num_slots = tokens.shape[1], controls.counts.shape[0]
    real = (jnp.arange(T) < count[:, None]) & (adjusts > 0)[:, None]
    rows = jnp.where(real, slots[:, None], num_slots)  # out of range: dropped
    counts = controls.counts.at[rows, tokens].add(1, mode="drop")
    return controls._replace(counts=counts.at[rows, tokens].min(_MOST, mode="drop"))


def adjusted(
    logits: jax.Array,
    drafts: jax.Array,
    positions: jax.Array,
    params: RequestParams,
    given: Adjustments,
) -> jax.Array:
    """Logits under the controls of their rows; rows without any keep their bits.

    The order: bias, repetition, frequency and presence penalty. Forbidden tokens do not depend on
    it: those outside of the mask, those with a bias of -inf, and ends before the minimum length. A
    bias or a minimum length that leaves a row no token of its mask is ignored in that row.

    Args:
      logits: [B, J+1, V] float32.
      drafts: [B, J] int32; row j comes after drafts d_1..d_j.
      positions: [B, J+1] int32, positions of the predicted tokens.
    Returns:
      Logits of the same shape, -inf for forbidden tokens.
    """
    own = jax.tree.map(lambda leaf: leaf[given.slots], given.controls)
    is_adjusted = _per_row(params.adjusts) > 0
    bias = vocabulary.columns(_bias(own))[:, None]
    penalised = _penalised(logits + jnp.where(bias > -jnp.inf, bias, 0.0), drafts, own)
    vocab_size = own.counts.shape[-1]
    kept = vocabulary.is_real(logits.shape, vocab_size)
    if given.mask is not None:
        kept = (_per_row(given.constrained) == 0) | _allowed(given.mask, vocab_size)
    kept = _narrowed(kept, ~is_adjusted | (bias > -jnp.inf))
    early = positions[..., None] < _per_row(own.min_end)
    is_end = vocabulary.columns(_is_end(own))[:, None]
    kept = _narrowed(kept, ~(is_adjusted & early & is_end))
    return jnp.where(kept, jnp.where(is_adjusted, penalised, logits), -jnp.inf)


def _per_row(x: jax.Array) -> jax.Array:
    """x [B] -> [B, 1, 1], for all rows of a sequence and all tokens."""
    return x[:, None, None]


def _narrowed(kept: jax.Array, allowed: jax.Array) -> jax.Array:
    """`kept & allowed` [..., V], or `kept` in rows where that would leave no token."""
    both = kept & allowed
    return jnp.where(vocabulary.any_of(both), both, kept)


def _bias(own: Controls) -> jax.Array:
    """[B, V] float32: bias of every token."""
    B, V = own.counts.shape
    dense = jnp.broadcast_to(own.base[:, None], (B, V))
    return dense.at[jnp.arange(B)[:, None], own.bias_ids].set(own.bias, mode="drop")


def _is_end(own: Controls) -> jax.Array:
    """[B, V] bool: whether a token ends the text."""
    B, V = own.counts.shape
    none = jnp.zeros((B, V), jnp.bool)
    return none.at[jnp.arange(B)[:, None], own.end_ids].set(True, mode="drop")


def _allowed(mask: jax.Array, vocab_size: int) -> jax.Array:
    """[..., V] bool from the bits of `mask` [..., mask_words(V)] int32; V is `vocab_size`."""
    bits = (mask[..., None] >> jnp.arange(32)) & 1
    return vocabulary.columns(bits.reshape(*mask.shape[:-1], -1)[..., :vocab_size] > 0)


def _penalised(logits: jax.Array, drafts: jax.Array, own: Controls) -> jax.Array:
    """Logits under the penalties of their rows."""
    J, V = drafts.shape[1], logits.shape[-1]
    counts = vocabulary.columns(own.counts)[:, None].astype(jnp.int32)
    for i in range(J):
        is_after = jnp.arange(J + 1)[:, None] > i
        counts += (_per_row(drafts[:, i]) == vocabulary.ids(V)) & is_after
    counts = jnp.minimum(counts, _MOST)  # as `count_tokens`, one token after the other
    seen = vocabulary.columns(own.in_prompt)[:, None] | (counts > 0)
    ratio = jnp.where(seen, _per_row(own.repetition), 1.0)
    logits = jnp.where(logits > 0, logits / ratio, logits * ratio)
    logits -= _per_row(own.frequency) * counts
    return logits - _per_row(own.presence) * (counts > 0)
