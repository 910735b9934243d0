"""Lossless speculative sampling: acceptance, residual and bonus (docs/algorithm.md, "The acceptance
rule").

Drafts are [B, J]; p_j is the target's distribution at row j and q_j the drafter's. Draft d at row j
is accepted with probability min(1, p_j(d) / q_j(d)). The first rejected draft is replaced by a
sample from max(p_j - q_j, 0); if all are accepted, a bonus token is sampled from p_J. Rows past a
request's own number of drafts have q = 0, so their residual is p: rejection and bonus are one case.
The output has exactly the target's distribution.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.method.adjust import Adjustments, adjusted
from peagle_jax.method.plan import RequestParams
from peagle_jax.method.sampling import (
    accept_uniforms,
    at_tokens,
    block_uniforms,
    cutoffs_of,
    emit_keys,
    has_filter,
    probabilities,
    probability_of,
    request_keys,
    sample_rows,
)
from peagle_jax.parallel import partition, vocabulary


class Verdict(NamedTuple):
    """Result of verification: the tokens a round emits.

    Attributes:
      tokens: [B, J+1] int32; only the first `count` of a row are valid.
      count: [B] int32 in 1..J+1: number of accepted drafts + 1.
      finite: [B, J+1] bool, whether the row's largest logit is finite: False for a row that
        contains NaN or +inf, and for a row of -inf only. The token of such a row is undefined.
        None: not computed.
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
    """Argmax [...] int32 and maximum [...] of logits [..., V], in one reduction or by
    tiles.

    Ties go to the lower index, and the first NaN counts as the largest, as in `jnp.argmax`.
    """
    axis = logits.ndim - 1
    if vocabulary.is_tiled(logits.shape[axis]):
        argmax = vocabulary.local_argmax(logits).astype(jnp.int32)
        maximum = jnp.take_along_axis(logits, argmax[..., None], axis=axis)[..., 0]
        return vocabulary.first_largest(argmax, maximum, logits.shape[axis])
    index = lax.broadcasted_iota(jnp.int32, logits.shape, axis)

    def larger(a, b):
        (x, i), (y, j) = a, b
        is_first = (x > y) | (x != x)
        is_lower = is_first | ((x == y) & (i < j))
        return jnp.where(is_first, x, y), jnp.where(is_lower, i, j)

    least = (jnp.array(-jnp.inf, logits.dtype), jnp.int32(0))
    maximum, argmax = lax.reduce((logits, index), least, larger, (axis,))
    return vocabulary.first_largest(argmax, maximum, logits.shape[-1])


def verify_greedy(best: jax.Array, drafts: jax.Array, num_draft: jax.Array) -> Verdict:
    """Temperature 0: accept drafts while they equal the target's argmax, then emit the argmax.

    Example: argmax [5, 7, 9], drafts [5, 8], num_draft 2 -> tokens [5, 7, 9], count 2.

    Args:
      best: the argmax [B, J+1].
      drafts: [B, J] int32.
      num_draft: [B] int32; drafts at rows `j >= num_draft` are ignored.
    """
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
    """The general rule. It needs p of each draft, and the full distribution of one row per
    sequence.

    Args:
      p_draft: [B, J] float32, the target's probability of each draft.
      p_at: function from rows [B] int32 in 0..J to the target's distributions [B, V] at these rows.
      drafts: [B, J] int32.
      q: [B, J, V] draft probabilities; None if the drafter proposes argmax tokens (q is one-hot).
      num_draft: [B] int32.
      uniforms: [B, J] in [0, 1).
      keys: [B, J+1], random keys for the emitted token at each row.
    """
    J = drafts.shape[1]
    is_draft = jnp.arange(J) < num_draft[:, None]
    q_draft = jnp.ones_like(p_draft) if q is None else at_tokens(q, drafts)
    # Strict inequality: a uniform of exactly 0 must not accept a token with p = 0.
    n = _leading((uniforms * q_draft < p_draft) & is_draft)

    target = p_at(n)
    if J == 0:
        proposed = jnp.zeros_like(target)
    elif q is None:
        padded = jnp.pad(drafts, ((0, 0), (0, 1)))
        proposed = vocabulary.one_hot(_row(padded, n), target.shape[-1], target.dtype)
    else:
        proposed = _row(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), n)
    proposed = jnp.where((n < num_draft)[:, None], proposed, 0.0)
    residual = jnp.maximum(target - proposed, 0.0)
    # If p == q the residual is 0, and only rounding can have rejected the draft: sample from p.
    residual = jnp.where(vocabulary.total(residual)[..., None] > 0, residual, target)
    return _emitted(drafts, n, sample_rows(residual, _row(keys, n)))


class Block(NamedTuple):
    """Distribution of the end of a block of J drafts: after i drafts with `chance`, then a token of
    `residual`."""

    # [B, J+1] float32, probability that the block ends after i drafts if it ends after no later one
    chance: jax.Array
    # [B, J+1, V] float32, unnormalised distribution of the token after i drafts
    residual: jax.Array


def block_law(p: jax.Array, drafts: jax.Array, q: jax.Array, num_draft: jax.Array) -> Block:
    """The law of block verification (Sun and others, arXiv 2403.10444).

    With r_0 = 1 and r_i = min(1, r_{i-1} p_i(d_i) / q_i(d_i)), the residual after i drafts is
    max(r_i p_{i+1} - q_{i+1}, 0). Z_i is its sum, and the chance of i drafts is Z_i / (Z_i + 1 -
    r_i). Where no draft follows, q is 0 and the chance is r_i.

    Args:
      p: [B, J+1, V], the target's distributions.
      drafts: [B, J] int32.
      q: [B, J, V], the drafter's; drafts count as far as it is positive at them.
      num_draft: [B] int32.
    """
    J, of_draft = drafts.shape[1], at_tokens(q, drafts)
    # A draft without a law, of logits that are not finite, and those behind it count as none.
    num_draft = jnp.minimum(num_draft, _leading(of_draft > 0))
    is_draft = jnp.arange(J) < num_draft[:, None]
    ratio = jnp.where(is_draft, at_tokens(p[:, :J], drafts) / of_draft, 0.0)
    reach = [jnp.ones(drafts.shape[:1], ratio.dtype)]
    for i in range(J):
        reach.append(jnp.minimum(1.0, reach[-1] * ratio[:, i]))
    r = jnp.stack(reach, axis=1)
    following = jnp.pad(jnp.where(is_draft[..., None], q, 0.0), ((0, 0), (0, 1), (0, 0)))
    residual = jnp.maximum(r[..., None] * p - following, 0.0)
    Z = vocabulary.total(residual)
    # Z is 0 where p is 0 at the draft, or where p and q are equal. Then r_{i+1} is r_i, and the
    # chances of later drafts decide.
    chance = jnp.where(Z > 0, Z / jnp.where(Z > 0, Z + 1 - r, 1.0), 0.0)
    is_end = jnp.arange(J + 1) <= num_draft[:, None]
    return Block(jnp.where(is_end, chance, 0.0).at[:, 0].set(1.0), residual)


def verify_block(
    p: jax.Array,
    drafts: jax.Array,
    q: jax.Array,
    num_draft: jax.Array,
    uniforms: jax.Array,
    keys: jax.Array,
) -> Verdict:
    """Block verification: keeps the most drafts i whose uniform is below their chance
    (`block_law`).

    The emitted tokens have the target's law, as with `verify_sampled`, and the expected number of
    accepted drafts is never lower: a draft that the target prefers makes up for one before it that
    it does not.

    Args:
      p: [B, J+1, V], the target's distributions. The others are those of `verify_sampled`.
    """
    J = drafts.shape[1]
    block = block_law(p, drafts, q, num_draft)
    accept = uniforms < block.chance[:, 1:]
    n = jnp.where(accept, jnp.arange(1, J + 1), 0).max(axis=1, initial=0)
    residual = _row(block.residual, n)
    residual = jnp.where(vocabulary.total(residual)[..., None] > 0, residual, _row(p, n))
    return _emitted(drafts, n, sample_rows(residual, _row(keys, n)))


def _emitted(drafts: jax.Array, n: jax.Array, token: jax.Array) -> Verdict:
    """The first n [B] of drafts [B, J], then `token` [B]."""
    J = drafts.shape[1]
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(J + 1) == n[:, None], token[:, None], tokens)
    return Verdict(tokens, n + 1)


def verify(
    logits: jax.Array,
    drafts: jax.Array,
    draft_probs: jax.Array | None,
    positions: jax.Array,
    params: RequestParams,
    adjustments: Adjustments | None = None,
    *,
    in_blocks: bool = False,
) -> Verdict:
    """The engine's acceptance rule, for batches that mix greedy and sampled rows.

    The general rule runs only if some row has a temperature above 0. Cutoffs are searched only if a
    row with a temperature also has top-k, top-p or min-p. Logits are adjusted only if some row asks
    for it; the other rows of such a batch keep their logits and their bits. Without temperatures
    (`plan.greedy_only`) there is no branch.

    Args:
      logits: [B, J+1, V] target logits; row j predicts the token at `positions[:, j]`.
      drafts: [B, J] int32.
      draft_probs: [B, J, V] float32, or None for argmax drafts.
      positions: [B, J+1] int32, positions of the predicted tokens.
      params: one row per sequence.
      adjustments: controls and masks of the sequences; None: no sequence has any.
      in_blocks: verify sampled drafts by `verify_block`. Greedy rows, and drafts without
        `draft_probs`, have one rule.
    """
    best, value = largest(logits)
    is_finite = jnp.isfinite(value)
    if params.temperature is None:
        return verify_greedy(best, drafts, params.num_draft)._replace(finite=is_finite)
    laws_of = partial(
        _laws,
        drafts=drafts,
        draft_probs=draft_probs,
        positions=positions,
        params=params,
        in_blocks=in_blocks,
    )
    plain = laws_of(logits, best)
    branches = [lambda law=law: law()._replace(finite=is_finite) for law in plain]
    samples = params.temperature > 0
    filters = has_filter(params)
    branch = jnp.any(samples).astype(jnp.int32) + jnp.any(samples & filters)
    if adjustments is not None:

        def of_adjusted(law: int) -> Verdict:
            own = adjusted(logits, drafts, positions, params, adjustments)
            own = lax.optimization_barrier(own)  # the rest compiles as in the plain branch
            best, value = largest(own)
            verdict = laws_of(own, best)[law]()
            # A row whose mask allows no token has no finite logit left.
            return verdict._replace(finite=is_finite & jnp.isfinite(value))

        branches += [partial(of_adjusted, law) for law in range(len(branches))]
        branch += len(plain) * jnp.any(adjustments.wanted(params))
    # One switch: a nested conditional in a CUDA graph costs 14 microseconds a round.
    return partition.switch(branch, branches)


verify_blocks = partial(verify, in_blocks=True)
"""`verify` with `verify_block` for sampled drafts."""


def _laws(
    logits: jax.Array,
    best: jax.Array,
    *,
    drafts: jax.Array,
    draft_probs: jax.Array | None,
    positions: jax.Array,
    params: RequestParams,
    in_blocks: bool,
) -> tuple[Callable[[], Verdict], ...]:
    """The three branches of `verify` over logits with argmax `best` [B, J+1]: greedy, unfiltered,
    filtered."""

    def greedy():
        return verify_greedy(best, drafts, params.num_draft)

    def drawn_of(cutoff):
        keys, emitted = request_keys(params), emit_keys(request_keys(params), positions)
        num_draft, temperature = params.num_draft, params.temperature[:, None]
        if in_blocks and draft_probs is not None:
            laws = probabilities(logits, temperature, cutoff)
            uniforms = block_uniforms(keys, positions[:, :-1], positions[:, 0] - 1)
            return verify_block(laws, drafts, draft_probs, num_draft, uniforms, emitted)
        own = probability_of(logits[:, :-1], drafts, temperature, cutoff[:, :-1])
        law = lambda n: probabilities(_row(logits, n), params.temperature, _row(cutoff, n))
        uniforms = accept_uniforms(keys, positions[:, :-1])
        return verify_sampled(own, law, drafts, draft_probs, num_draft, uniforms, emitted)

    def mixed(cutoff):
        drawn, exact = drawn_of(cutoff), greedy()
        is_greedy = params.temperature == 0
        return Verdict(
            jnp.where(is_greedy[:, None], exact.tokens, drawn.tokens),
            jnp.where(is_greedy, exact.count, drawn.count),
        )

    # The barriers hide the constant cutoff, so both branches compile to identical arithmetic.
    # Without them a request's bits would depend on whether another request of the batch filters.
    def unfiltered():
        return mixed(lax.optimization_barrier(jnp.full(logits.shape[:-1], -jnp.inf)))

    def filtered():
        own = lax.optimization_barrier(logits)
        return mixed(lax.optimization_barrier(cutoffs_of(own, params)))

    return greedy, unfiltered, filtered
