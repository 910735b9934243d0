"""From logits to probabilities and draws. All in float32; every draw is keyed by request and position.

One key per request, folded with the position of the token it decides and with a purpose. So neither
batching nor preemption changes the randomness a token meets, and the three draws that concern one
position (propose, accept, emit) are independent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

_PROPOSE, _ACCEPT, _EMIT = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestParams:
    """What requests asked for, one row per slot or per batch row."""

    seed: jax.Array  # [B, 2] uint32
    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    num_draft: jax.Array  # [B] int32
    num_logprobs: jax.Array  # [B] int32, -1 when not wanted

    @property
    def keys(self) -> jax.Array:
        """Request keys [B]."""
        return jax.random.wrap_key_data(self.seed)


def _keys(keys: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Keys [B], positions [B, T] of the decided tokens -> keys [B, T]."""
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    return jax.vmap(jax.vmap(fold, (None, 0)))(keys, positions)


def draft_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys [B, T] for drawing draft tokens at `positions` [B, T]."""
    return _keys(keys, positions, _PROPOSE)


def accept_uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Uniforms in [0, 1) [B, T] for testing the drafts at `positions` [B, T]."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(keys, positions, _ACCEPT))


def emit_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys [B, T] for drawing the emitted (residual or bonus) tokens at `positions` [B, T]."""
    return _keys(keys, positions, _EMIT)


def at_tokens(rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """rows [..., V] and tokens [...] -> [...]: each row's number of its token."""
    return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


def sample_rows(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """One draw per row, proportional to `weights`.

    Args:
      weights: [..., V] float32, not negative, at least one positive; need not sum to 1.
      keys: [...].
    Returns:
      [...] int32.
    """
    V = weights.shape[-1]
    draw = lambda key: jax.random.gumbel(key, (V,), jnp.float32)
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    # Gumbel-max; log(0) = -inf, so a token without weight is never drawn.
    return jnp.argmax(jnp.log(weights) + draw(keys), axis=-1).astype(jnp.int32)


def _scaled(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """float32 [..., V], the largest of each row 0: a temperature near zero must not overflow it."""
    logits = logits.astype(jnp.float32)
    return (logits - logits.max(-1, keepdims=True)) / _divisor(temperature)[..., None]


def _divisor(temperature: jax.Array) -> jax.Array:
    return jnp.where(temperature > 0, temperature, 1.0)


def cutoffs(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """What `probabilities` takes as `cutoff`, for temperature, then top-k, top-p, min-p.

    Sorts the vocabulary of every row: to be avoided where nobody filters.

    Args:
      logits: [..., V].
      temperature, top_k (0: off), top_p (1: off), min_p (0: off): broadcastable to [...].
    Returns:
      [...] float32, -inf where nothing is filtered.
    """
    V, shape = logits.shape[-1], logits.shape[:-1]
    temperature, top_k, top_p, min_p = (
        jnp.broadcast_to(rule, shape) for rule in (temperature, top_k, top_p, min_p)
    )
    ordered = -jnp.sort(-_scaled(logits, temperature), axis=-1)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)[..., None]
    in_top_k = jnp.arange(V) < limit
    probs = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The first token always stays: before is 0 there and top_p is positive.
    kept = in_top_k & ((before < top_p[..., None]) | (top_p[..., None] >= 1.0))
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
    least = jnp.where((top_k > 0) | (top_p < 1.0), least, -jnp.inf)
    return jnp.maximum(least, jnp.log(min_p))  # the likeliest token has a scaled logit of 0


def probabilities(
    logits: jax.Array, temperature: jax.Array, cutoff: jax.Array | None = None
) -> jax.Array:
    """The distribution a request samples from.

    Args:
      logits: [..., V].
      temperature: broadcastable to [...]; 0 gives a one-hot row at the argmax.
      cutoff: [...], the least scaled logit that a request's filters keep, from `cutoffs`; equal logits
        share their fate. None: all stay.
    Returns:
      [..., V] float32 rows that sum to 1.
    """
    temperature = jnp.broadcast_to(temperature, logits.shape[:-1])
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    powers = _powers(_scaled(logits, temperature), cutoff)
    drawn = powers / powers.sum(-1, keepdims=True)
    return jnp.where((temperature > 0)[..., None], drawn, greedy)


def probability_of(
    logits: jax.Array, tokens: jax.Array, temperature: jax.Array, cutoff: jax.Array
) -> jax.Array:
    """`probabilities` of one token a row, without those of the others in memory.

    Args:
      logits: [..., V].
      tokens: [...] int32.
      temperature, cutoff: as of `probabilities`; with temperature 0 each token with the largest logit
        has 1.
    Returns:
      [...] float32.
    """
    temperature = jnp.broadcast_to(temperature, tokens.shape)
    total = _powers(_scaled(logits, temperature), cutoff).sum(-1)
    below = at_tokens(logits, tokens).astype(jnp.float32) - logits.max(-1).astype(jnp.float32)
    drawn = _powers((below / _divisor(temperature))[..., None], cutoff)[..., 0] / total
    return jnp.where(temperature > 0, drawn, (below == 0).astype(jnp.float32))


def _powers(scaled: jax.Array, cutoff: jax.Array | None) -> jax.Array:
    powers = jnp.exp(scaled)
    return powers if cutoff is None else jnp.where(scaled >= cutoff[..., None], powers, 0.0)
