"""Log-probabilities of output tokens: of the model's law, or of the law that samples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.method.adjust import Adjustments, adjusted
from peagle_jax.method.plan import SAMPLED, RequestParams
from peagle_jax.method.sampling import at_tokens, cutoffs_of, law_logits
from peagle_jax.parallel import partition, vocabulary

Scores = tuple[jax.Array, jax.Array, jax.Array]
"""Log-probabilities of tokens [...] float32; ids int32 and log-probabilities float32 of the n
likeliest, each [..., n]."""


def score(logits: jax.Array, tokens: jax.Array, num_top: int) -> Scores:
    """Scores of `tokens` [...] int32 under the softmax of `logits` [..., V], with n = `num_top`."""
    logprobs = vocabulary.log_softmax(logits)
    return at_tokens(logprobs, tokens), *vocabulary.top(logprobs, num_top)


def sampled_logits(
    logits: jax.Array,
    drafts: jax.Array,
    positions: jax.Array,
    params: RequestParams,
    adjustments: Adjustments | None,
) -> jax.Array:
    """Logits [B, J+1, V] of the law that samples, after controls, masks, temperature and filters.

    Arguments as in `verify.verify`. The bits of a row depend on no other row.
    """
    if adjustments is not None:
        logits = adjusted(logits, drafts, positions, params, adjustments)
    own = lax.optimization_barrier(logits)  # the rest compiles as in `verify`
    cutoff = lax.optimization_barrier(cutoffs_of(own, params))
    return law_logits(own, params.temperature[:, None], cutoff)


def score_rows(
    logits: jax.Array,
    tokens: jax.Array,
    scored: jax.Array,
    num_top: int,
    sampled: Callable[[], jax.Array],
) -> Scores:
    """Scores of the tokens of a call; zeros if no row asks for them.

    Args:
      logits: [B, T, V] of the model.
      tokens: [B, T] int32.
      scored: [B] int32, `RequestParams.scored`.
      num_top: n.
      sampled: returns `sampled_logits` [B, T, V]; computed only if a row asks for its scores.
    """

    def none() -> Scores:
        top = (*tokens.shape, num_top)
        zeros = (jnp.zeros(shape, jnp.float32) for shape in (tokens.shape, top))
        return next(zeros), jnp.zeros(top, jnp.int32), next(zeros)

    def mixed() -> Scores:
        own = jnp.where((scored == SAMPLED)[:, None, None], sampled(), logits)
        # Behind the barrier `score` compiles as in the branch without sampled rows.
        return score(lax.optimization_barrier(own), tokens, num_top)

    branches = (none, lambda: score(logits, tokens, num_top), mixed)
    return partition.switch(jnp.max(scored), branches)
