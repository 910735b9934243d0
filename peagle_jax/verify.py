"""The lossless rule (peagle-spec 3.10) and nothing else: accept, residual, bonus.

J drafts per sequence make a rectangle [B, J]. A draft d at row j survives with probability
min(1, p_j(d) / q_j(d)); the first casualty is replaced by a draw from max(p_j - q_j, 0), and when all
survive a bonus is drawn from p_J. Past a request's own number of drafts q is zero, so the residual
there is p itself: rejection and bonus are one case. The emitted text has exactly the target's law.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.sampling import (
    RequestParams,
    accept_uniforms,
    at_tokens,
    cutoffs,
    emit_keys,
    probabilities,
    probability_of,
    sample_rows,
)


class Verdict(NamedTuple):
    """What a round emits.

    Attributes:
      tokens: [B, J+1] int32.
      count: [B] int32 in 1..J+1, how many of the tokens are real.
      finite: [B, J+1] bool, whether a row's largest logit is a finite number: False for a row with NaN or
        +inf in it, and for a row of -inf. A token of such a row means nothing. None: not looked at.
    """

    tokens: jax.Array
    count: jax.Array
    finite: jax.Array | None = None


def _leading(accept: jax.Array) -> jax.Array:
    """Number of leading accepted drafts [B] of accept [B, J]."""
    return jnp.cumprod(accept.astype(jnp.int32), axis=1).sum(axis=1)


def _row(x: jax.Array, n: jax.Array) -> jax.Array:
    """x [B, T, ...] -> [B, ...], its row n [B]."""
    return jnp.take_along_axis(x, n.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Argmax [...] int32 and maximum [...] of logits [..., V], in one reduction.

    Of equals the lower index; the first NaN counts as the largest, as in `jnp.argmax`.
    """
    axis = logits.ndim - 1
    index = lax.broadcasted_iota(jnp.int32, logits.shape, axis)

    def pick(one, other):
        (x, i), (y, j) = one, other
        is_first = (x > y) | (x != x)
        is_lower = is_first | ((x == y) & (i < j))
        return jnp.where(is_first, x, y), jnp.where(is_lower, i, j)

    least = (jnp.array(-jnp.inf, logits.dtype), jnp.int32(0))
    best, found = lax.reduce((logits, index), least, pick, (axis,))
    return found, best


def verify_greedy(logits: jax.Array, drafts: jax.Array, num_draft: jax.Array) -> Verdict:
    """Temperature 0: keep drafts while they equal the target's argmax, then emit the argmax.

    Example: argmax [5, 7, 9], drafts [5, 8], num_draft 2 -> tokens [5, 7, 9], count 2.

    Args:
      logits: [B, J+1, V].
      drafts: [B, J] int32.
      num_draft: [B] int32; drafts at rows `j >= num_draft` do not count.
    """
    return _greedy(largest(logits)[0], drafts, num_draft)


def _greedy(best: jax.Array, drafts: jax.Array, num_draft: jax.Array) -> Verdict:
    """`verify_greedy` of the argmax [B, J+1]."""
    J = drafts.shape[1]
    accept = (drafts == best[:, :J]) & (jnp.arange(J) < num_draft[:, None])
    return Verdict(best, _leading(accept) + 1)


def verify_sampled(
    p_draft: jax.Array,
    p_at: Callable[[jax.Array], jax.Array],
    drafts: jax.Array,
    q: jax.Array | None,
    num_draft: jax.Array,
    uniforms: jax.Array,
    keys: jax.Array,
) -> Verdict:
    """The general law. Of the target's distributions it needs one number a draft, and one row in full.

    Args:
      p_draft: [B, J] the target's probability of each draft.
      p_at: the target's distributions [B, V] at rows [B] int32 in 0..J.
      drafts: [B, J] int32.
      q: [B, J, V] draft probabilities, or None when the drafter proposes one token with certainty.
      num_draft: [B] int32.
      uniforms: [B, J] in [0, 1).
      keys: [B, J+1] for the emitted token at each row.
    """
    J = drafts.shape[1]
    counts = jnp.arange(J) < num_draft[:, None]
    q_draft = jnp.ones_like(p_draft) if q is None else at_tokens(q, drafts)
    # Strict: a uniform of exactly 0 must not accept a token the target cannot emit.
    n = _leading((uniforms * q_draft < p_draft) & counts)

    target = p_at(n)
    if J == 0:
        proposed = jnp.zeros_like(target)
    elif q is None:
        padded = jnp.pad(drafts, ((0, 0), (0, 1)))
        proposed = jax.nn.one_hot(_row(padded, n), target.shape[-1], dtype=target.dtype)
    else:
        proposed = _row(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), n)
    proposed = jnp.where((n < num_draft)[:, None], proposed, 0.0)
    residual = jnp.maximum(target - proposed, 0.0)
    # p == q leaves no residual; a rejection is then a rounding accident, and p itself is right.
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, target)
    emitted = sample_rows(residual, _row(keys, n))
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(J + 1) == n[:, None], emitted[:, None], tokens)
    return Verdict(tokens, n + 1)


def verify(
    logits: jax.Array,
    drafts: jax.Array,
    draft_probs: jax.Array | None,
    positions: jax.Array,
    params: RequestParams,
) -> Verdict:
    """The engine's acceptance rule: greedy rows and sampled rows in one batch.

    The general law runs only when some row has a temperature, and sorts only when one of them filters.

    Args:
      logits: [B, J+1, V] target logits; row j decides the token at `positions[:, j]`.
      drafts: [B, J]; draft_probs: [B, J, V] or None.
      positions: [B, J+1] int32 positions of the decided tokens.
      params: one row per sequence.
    """

    best, value = largest(logits)

    def greedy():
        return _greedy(best, drafts, params.num_draft)

    def mixed(cutoff):
        drawn = verify_sampled(
            probability_of(logits[:, :-1], drafts, params.temperature[:, None], cutoff[:, :-1]),
            lambda n: probabilities(_row(logits, n), params.temperature, _row(cutoff, n)),
            drafts,
            draft_probs,
            params.num_draft,
            accept_uniforms(params.keys, positions[:, :-1]),
            emit_keys(params.keys, positions),
        )
        exact = greedy()
        is_greedy = params.temperature == 0
        return Verdict(
            jnp.where(is_greedy[:, None], exact.tokens, drawn.tokens),
            jnp.where(is_greedy, exact.count, drawn.count),
        )

    # To the compiler both have a cutoff and logits of which nothing is known. So it makes the same code of
    # the law, and a request's bits do not depend on whether another filters.
    def unfiltered():
        return mixed(lax.optimization_barrier(jnp.full(logits.shape[:-1], -jnp.inf)))

    def filtered():
        rules = (params.temperature, params.top_k, params.top_p, params.min_p)
        own = lax.optimization_barrier(logits)
        return mixed(lax.optimization_barrier(cutoffs(own, *(rule[:, None] for rule in rules))))

    samples = params.temperature > 0
    filters = (params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0)
    # One branch of three: in a CUDA graph a branch within a branch costs 14 microseconds a round.
    which = jnp.any(samples).astype(jnp.int32) + jnp.any(samples & filters)
    verdict = lax.switch(which, (greedy, unfiltered, filtered))
    return verdict._replace(finite=jnp.isfinite(value))
