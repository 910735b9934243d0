"""From logits to probabilities and draws. All in float32; every draw is keyed by request and position.

One key per request, folded with the position of the token it decides and with a purpose. So neither
batching nor preemption changes the randomness a token meets, and the three draws that concern one
position (propose, accept, emit) are independent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

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


def _keep_top(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask [..., V] of the tokens that top-k and then top-p keep; equal logits share their fate."""
    V = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)[..., None]
    in_top_k = jnp.arange(V) < limit
    probs = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # The first token always stays: before is 0 there and top_p is positive.
    kept = in_top_k & ((before < top_p[..., None]) | (top_p[..., None] >= 1.0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return scaled >= threshold


def probabilities(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    min_p: jax.Array | None = None,
) -> jax.Array:
    """The distribution a request samples from: temperature, then top-k, top-p, min-p.

    Args:
      logits: [..., V].
      temperature: broadcastable to [...]; 0 gives a one-hot row at the argmax.
      top_k (0: off), top_p (1: off), min_p (0: off): like `temperature`; None switches a filter off
        for every row at compile time.
    Returns:
      [..., V] float32 rows that sum to 1.
    """
    logits = logits.astype(jnp.float32)
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    temperature = jnp.broadcast_to(temperature, logits.shape[:-1])
    # Shifted first: a temperature near zero must not overflow the largest logit.
    shifted = logits - logits.max(-1, keepdims=True)
    scaled = shifted / jnp.where(temperature > 0, temperature, 1.0)[..., None]
    if top_k is not None or top_p is not None:
        shape = logits.shape[:-1]
        top_k = jnp.broadcast_to(0 if top_k is None else top_k, shape)
        top_p = jnp.broadcast_to(1.0 if top_p is None else top_p, shape).astype(jnp.float32)
        # Sorting a vocabulary is the dearest part of sampling: only when some row asks for it.
        keep = lax.cond(
            jnp.any((top_k > 0) | (top_p < 1.0)),
            _keep_top,
            lambda scaled, *_: jnp.ones(scaled.shape, bool),
            scaled,
            top_k,
            top_p,
        )
        scaled = jnp.where(keep, scaled, -jnp.inf)
    probs = jax.nn.softmax(scaled, axis=-1)
    if min_p is not None:
        floor = jnp.broadcast_to(min_p, logits.shape[:-1])[..., None]
        probs = jnp.where(probs >= floor * probs.max(-1, keepdims=True), probs, 0.0)
        probs = probs / probs.sum(-1, keepdims=True)
    return jnp.where((temperature > 0)[..., None], probs, greedy)


def probability_of(
    logits: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """`probabilities` of one token a row, without writing the others down where no row filters.

    Args:
      logits: [..., V].
      tokens: [...] int32.
      temperature, top_k, top_p, min_p: as of `probabilities`; with temperature 0 every token with the
        largest logit has 1.
    Returns:
      [...] float32.
    """
    at_tokens = lambda rows: jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]
    best = logits.max(-1).astype(jnp.float32)
    divisor = jnp.where(temperature > 0, temperature, 1.0)
    power = lambda x, best, divisor: jnp.exp((x.astype(jnp.float32) - best) / divisor)
    total = power(logits, best[..., None], divisor[..., None]).sum(-1)
    chosen = at_tokens(logits)
    greedy = (chosen == best).astype(jnp.float32)
    drawn = jnp.where(temperature > 0, power(chosen, best, divisor) / total, greedy)
    # Rows that filter nothing keep these numbers, to the bit, whatever the others do.
    filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0)

    def with_filters():
        return at_tokens(probabilities(logits, temperature, top_k, top_p, min_p))

    return lax.cond(
        jnp.any(filters), lambda: jnp.where(filters, with_filters(), drawn), lambda: drawn
    )
