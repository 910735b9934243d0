"""Sampling: logits -> probabilities -> tokens, in float32.

The random key of a draw is the request's key, folded with the token's position and a purpose. So a
token's randomness does not depend on batching or preemption, and the three draws for one position
(propose, accept, emit) are independent.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.cutoffs import api as filters
from peagle_jax.method.plan import RequestParams
from peagle_jax.parallel import partition, vocabulary

_PROPOSE, _ACCEPT, _EMIT = 0, 1, 2

_BITS, _PASSES = 2, 15
"""Bits of a cutoff that each pass over the vocabulary finds, and the number of these passes. The
first pass finds one bit; the sign is 0. More bits: fewer passes, with more sums. Two are the
fastest on an H200."""
_INFINITY = 0x7F800000
"""The bits of infinity."""
_NO_COUNT = 2**31 - 1
"""More tokens than a vocabulary has."""


def request_keys(params: RequestParams) -> jax.Array:
    """Random keys [B] of the requests, from `params.seed`."""
    return jax.random.wrap_key_data(params.seed)


def _keys(keys: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """Request keys [B] and token positions [B, T] -> keys [B, T]."""
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    return jax.vmap(jax.vmap(fold, (None, 0)))(keys, positions)


def draft_keys(keys: jax.Array, positions: jax.Array, newest: jax.Array) -> jax.Array:
    """Keys [B, T] for sampling the draft tokens at `positions` [B, T] after a text.

    `newest` [B] is the position of the text's newest token. A later round that drafts for the same
    position has another key. So its draft is independent of what was done with the older one.
    """
    return _after(_keys(keys, positions, _PROPOSE), newest)


def _after(keys: jax.Array, newest: jax.Array) -> jax.Array:
    """Keys [B, T] that another length of the text would not have; `newest` [B]."""
    return jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(keys, newest)


def accept_uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Uniforms in [0, 1) [B, T] for the acceptance tests of the drafts at `positions` [B, T]."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(keys, positions, _ACCEPT))


def block_uniforms(keys: jax.Array, positions: jax.Array, newest: jax.Array) -> jax.Array:
    """`accept_uniforms` of a block of drafts after a text whose newest token is at `newest` [B].

    How a block ends depends on the uniforms of all its drafts, also of those after the end. A later
    round tests drafts at these positions again, so it needs uniforms of its own.
    """
    return jax.vmap(jax.vmap(jax.random.uniform))(_after(_keys(keys, positions, _ACCEPT), newest))


def emit_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys [B, T] for sampling the residual or bonus tokens at `positions` [B, T]."""
    return _keys(keys, positions, _EMIT)


def at_tokens(rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gathers `rows[..., token]`: rows [..., V] and tokens [...] -> [...]."""
    return vocabulary.at_tokens(rows, tokens)


def sample_rows(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Samples one index per row with probability proportional to `weights`.

    Args:
      weights: [..., V] float32, non-negative, at least one positive; need not sum to 1.
      keys: [...] random keys.
    Returns:
      [...] int32.
    """
    V = weights.shape[-1]
    if (n := partition.size()) == 1:
        draw = lambda key: jax.random.gumbel(key, (V,), jnp.float32)
    else:  # the noise of a token does not depend on the number of devices
        draw = lambda key: vocabulary.columns(jax.random.gumbel(key, (n * V,), jnp.float32))
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    # Gumbel-max. log(0) = -inf, so a token of weight 0 is never sampled.
    return vocabulary.argmax(jnp.log(weights) + draw(keys)).astype(jnp.int32)


def _scaled(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits / temperature in float32 [..., V], shifted to a row maximum of 0 before the division.

    Without the shift a temperature near zero would overflow.
    """
    logits = logits.astype(jnp.float32)
    return (logits - vocabulary.maximum(logits)[..., None]) * _inverse(temperature)[..., None]


def _inverse(temperature: jax.Array) -> jax.Array:
    """1 / temperature, 1 for greedy rows.

    XLA divides whole rows by their temperatures with a product like this, but divides single
    tokens. The two differ by rounding: the token at the cutoff would then lie below it and lose its
    probability.
    """
    normal = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)  # the inverse is finite
    return 1.0 / jnp.where(temperature > 0, normal, 1.0)


def has_filter(params: RequestParams) -> jax.Array:
    """Whether a row has a filter, [B] bool."""
    return (params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0)


def cutoffs_of(logits: jax.Array, params: RequestParams) -> jax.Array:
    """`cutoffs` [B, T] of logits [B, T, V] by the rows' parameters."""
    rules = (params.temperature, params.top_k, params.top_p, params.min_p)
    return cutoffs(logits, *(rule[:, None] for rule in rules))


def cutoffs(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """The `cutoff` of `probabilities`: the least scaled logit after temperature, top-k, top-p and
    min-p.

    Top-p keeps the least number of most likely tokens whose probability, among all tokens that
    top-k keeps, is at least top_p. Ties with the last token are all kept by both. A kernel reads a
    row that filters once; without one every row is read 16 times for each filter: call it only if
    some row filters.

    Args:
      logits: [..., V].
      temperature, top_k (0: off), top_p (1: off), min_p (0: off): broadcastable to [...].
    Returns:
      [...] float32, -inf for rows without filters; may be -inf where the filters keep all tokens.
    """
    rules = (temperature, top_k, top_p, min_p)
    rules = (jnp.broadcast_to(rule, logits.shape[:-1]) for rule in rules)
    temperature, top_k, top_p, min_p = rules
    logits = logits.astype(jnp.float32)
    if partition.size() == 1 and filters.has_kernel(logits):
        limit = filters.cutoffs(logits, _inverse(temperature), top_k, top_p)
    else:
        limit = _limits(jnp.abs(_scaled(logits, temperature)), top_k, top_p)
    return jnp.maximum(-limit, jnp.log(min_p))  # relative to the largest scaled logit, which is 0


def _limits(below: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """As `filters.cutoffs`, from how far tokens lie `below` the likeliest one [..., V]; also on
    several devices."""
    at_most = jnp.where(top_k > 0, top_k, _NO_COUNT)
    limit = _least_with(below, jnp.ones_like(below, jnp.int32), lambda _: at_most)
    # The dropped tokens go to infinity, where their weights are 0. If only the weights changed,
    # both filters would begin with the same masks, and XLA would store these instead of computing
    # them in each sum.
    below = jnp.where(below <= limit[..., None], below, jnp.inf)
    mass = lambda total: jnp.where(top_p < 1.0, top_p * total, jnp.inf)
    return jnp.minimum(limit, _least_with(below, jnp.exp(-below), mass))


def _least_with(
    values: jax.Array, weights: jax.Array, goal: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The least limit of each row such that the weights of the values up to it add up to the goal.

    The bits of floats that are not negative are ordered as the floats. So the limit's bits are
    found from the highest, two in each pass: their number is how many of the sums up to the
    possible limits miss the goal. On a CPU the passes are a loop, which compiles in a third of the
    time. Elsewhere they are not: a CUDA graph cannot contain a loop.

    In one pass all sums are added in the same order, so rounding keeps them monotone in the limit,
    and none exceeds the total. Between passes XLA may choose another order. A sum whose rounding
    then differs moves the limit by as much probability, and does no other harm.

    Args:
      values: [..., V] float32, not negative. NaN is above infinity.
      weights: [..., V] float32 or int32, not negative.
      goal: function from the sums of all weights [...] to the goals [...].
    Returns:
      [...] float32; infinity if no sum reaches the goal. If the goal is 0 or less, 0.
    """
    # Once, and not in each sum: a TPU copies an array that it reshapes.
    bits = lax.bitcast_convert_type(vocabulary.in_spans(values, jnp.inf), jnp.int32)
    weights = vocabulary.in_spans(weights, 0)

    def sums_up_to(limit, shift, most):
        # The bits below those of this pass are 1: a sum is over all limits that begin as its own.
        limits = [limit + ((i << shift) - 1) for i in range(1, most + 1)]
        is_up_to = [bits <= x[..., None, None] for x in limits]
        return vocabulary.totals(
            [jnp.where(mask, weights, jnp.zeros_like(weights)) for mask in is_up_to]
        )

    first = _BITS * _PASSES
    below, everything = sums_up_to(jnp.zeros(values.shape[:-1], jnp.int32), first, 2)
    goals = goal(everything)  # the last limit has all bits
    limit = (below < goals).astype(jnp.int32) << first

    def pass_of(i, limit):
        shift = first - _BITS * (i + 1)
        sums = sums_up_to(limit, shift, 2**_BITS - 1)
        return limit + ((sums < goals).sum(0, dtype=jnp.int32) << shift)

    if dispatch.platform() == "cpu":
        limit = partition.repeat(_PASSES, pass_of, limit)
    else:
        for i in range(_PASSES):
            limit = pass_of(i, limit)
    return lax.bitcast_convert_type(jnp.minimum(limit, _INFINITY), jnp.float32)


def probabilities(
    logits: jax.Array, temperature: jax.Array, cutoff: jax.Array | None = None
) -> jax.Array:
    """The distribution a request samples from.

    Args:
      logits: [..., V].
      temperature: broadcastable to [...]; 0 gives a one-hot row at the argmax.
      cutoff: [...], the least scaled logit that the filters keep, from `cutoffs`; ties are all
        kept. None: no filter.
    Returns:
      [..., V] float32 rows that sum to 1.
    """
    temperature = jnp.broadcast_to(temperature, logits.shape[:-1])
    greedy = vocabulary.one_hot(vocabulary.argmax(logits), logits.shape[-1], jnp.float32)
    weights = _exp_kept(_scaled(logits, temperature), cutoff)
    sampled = weights / vocabulary.total(weights)[..., None]
    return jnp.where((temperature > 0)[..., None], sampled, greedy)


def probability_of(
    logits: jax.Array, tokens: jax.Array, temperature: jax.Array, cutoff: jax.Array
) -> jax.Array:
    """`probabilities` at one token per row, without materialising [..., V] probabilities.

    Args:
      logits: [..., V].
      tokens: [...] int32.
      temperature, cutoff: as in `probabilities`. At temperature 0 every token that ties for the
        largest logit has probability 1.
    Returns:
      [...] float32.
    """
    temperature = jnp.broadcast_to(temperature, tokens.shape)
    total = vocabulary.total(_exp_kept(_scaled(logits, temperature), cutoff))
    chosen = at_tokens(logits, tokens).astype(jnp.float32)
    shifted = chosen - vocabulary.maximum(logits).astype(jnp.float32)
    sampled = _exp_kept((shifted * _inverse(temperature))[..., None], cutoff)[..., 0] / total
    return jnp.where(temperature > 0, sampled, (shifted == 0).astype(jnp.float32))


def law_logits(logits: jax.Array, temperature: jax.Array, cutoff: jax.Array) -> jax.Array:
    """Logits [..., V] float32 of the law that a request samples from; -inf where the filters drop.

    Arguments as in `probabilities`. At temperature 0, where nothing is sampled, the law is that of
    temperature 1 without filters, as in vLLM.
    """
    scaled = _scaled(logits, temperature)
    least = jnp.where(temperature > 0, cutoff, -jnp.inf)
    return jnp.where(scaled >= least[..., None], scaled, -jnp.inf)


def _exp_kept(scaled: jax.Array, cutoff: jax.Array | None) -> jax.Array:
    """exp of scaled logits [..., V]; 0 below the cutoff [...]."""
    weights = jnp.exp(scaled)
    return weights if cutoff is None else jnp.where(scaled >= cutoff[..., None], weights, 0.0)
