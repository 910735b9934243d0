"""Survival of drafts: how likely each draft is to be accepted, and which drafts a round verifies.

The confidence of draft j is the drafter's largest probability at its position, max_v q_j(v). A table per
position, counted from the rounds before, turns it into c_j, the probability that draft j is accepted after
the drafts before it. The survival s_j = c_1 * .. * c_j never rises with j. So the R drafts with the largest
survival over all sequences are a prefix of each sequence's drafts (docs/adaptive.md, "Survival").

Whether draft j is verified may depend on the drafts before it and on texts that are decided, never on
draft j itself or on later ones. max_v q_j(v) depends on the drafts before it only; q_j(d_j) would not do.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.parallel import vocabulary
from peagle_jax.plan import SURVIVAL_BINS, DecodePlan, SurvivalReport

BINS = 20
"""Bins of a confidence's logit."""
# Bin i holds logits from _LEAST + i * _WIDTH; the last one all above 9.25.
_LEAST, _WIDTH = -5.0, 0.75
_PRIOR = 16.0  # pseudo-count, in drafts, of the drafter's own confidence beside the counted drafts
_DECAY = 0.998  # of the counts, per round: a draft of 350 rounds ago has half its weight


class Survival(NamedTuple):
    """Device state between rounds. S slots, J drafts per slot."""

    confidence: jax.Array  # [S, J] float32, of the drafts that the last counted call made
    # [S] int32, length of each sequence after that call; at another length `confidence` is stale
    place: jax.Array
    reached: jax.Array  # [J, BINS] float32, decayed number of drafts that were tested
    accepted: jax.Array  # [J, BINS] float32, decayed number of those that were accepted


def init_survival(num_slots: int, num_draft: int) -> Survival:
    """Counts of zero: the drafter's confidence then is the estimated probability of acceptance."""
    counts = lambda: jnp.zeros((num_draft, BINS), jnp.float32)
    confidence = jnp.zeros((num_slots, num_draft), jnp.float32)
    return Survival(confidence, jnp.zeros(num_slots, jnp.int32), counts(), counts())


def confidence_of(logits: jax.Array) -> jax.Array:
    """The largest probability of each row: logits [..., V] -> [...] float32, at temperature 1."""
    logits = logits.astype(jnp.float32)
    largest = vocabulary.maximum(logits)[..., None]
    return 1.0 / vocabulary.total(jnp.exp(logits - largest))


def bin_of(confidence: jax.Array) -> jax.Array:
    """Bin [...] int32 of a confidence [...]; NaN counts as 0."""
    confidence = jnp.where(confidence > 0, confidence, 0.0)
    logit = jnp.log(confidence) - jnp.log1p(-confidence)
    return jnp.clip((logit - _LEAST) / _WIDTH, 0, BINS - 1).astype(jnp.int32)


def confidences(survival: Survival, plan: DecodePlan, num_draft: int) -> jax.Array:
    """[B, K] float32, confidence of the first K = `num_draft` drafts of a round; 1 for forced drafts."""
    confidence = survival.confidence[plan.slots, :num_draft]
    if plan.forced is None:
        return confidence
    is_forced = plan.forced[:, :num_draft] >= 0
    return jnp.where(is_forced, 1.0, confidence)


def survivals(survival: Survival, confidence: jax.Array) -> jax.Array:
    """[B, K] float32, s_j of drafts with `confidence` [B, K]; never rises with j."""
    num_draft = confidence.shape[1]
    prior = jax.nn.sigmoid(_LEAST + _WIDTH * (jnp.arange(BINS) + 0.5))
    rates = (survival.accepted + _PRIOR * prior) / (survival.reached + _PRIOR)
    chances = jnp.minimum(rates[jnp.arange(num_draft), bin_of(confidence)], 1.0)
    product, products = jnp.ones(len(confidence), jnp.float32), []
    for j in range(num_draft):  # not cumprod: a parallel scan rounds in another order and may rise
        product = product * chances[:, j]
        products.append(product)
    return jnp.stack(products, axis=1) if products else chances


def select(survival: jax.Array, num_draft: jax.Array, num_rows: int) -> jax.Array:
    """Number of drafts that each sequence verifies: the `num_rows` drafts with the largest survival.

    Ties go to the earlier position, then to the lower row of the batch. With survivals [[.9, .5],
    [.8, .7]] and three rows, the first sequence verifies one draft and the second two.

    Args:
      survival: [B, K] float32 that never rises with j.
      num_draft: [B] int32, drafts that may be verified, at most K.
      num_rows: R.
    Returns:
      [B] int32, at most `num_draft`, with a sum of at most R.
    """
    B, K = survival.shape
    is_draft = jnp.arange(K)[:, None] < num_draft
    # Ordered by position, then by sequence: a draft never decides over an earlier one of its sequence.
    values = jnp.where(is_draft, survival.T, -1.0).reshape(-1)
    order = jnp.arange(K * B)
    tied = (values == values[:, None]) & (order < order[:, None])
    # Counting the larger ones needs no sort, which a CUDA graph may not contain.
    rank = ((values > values[:, None]) | tied).sum(axis=1, dtype=jnp.int32)
    chosen = (rank < num_rows).reshape(K, B) & is_draft
    return chosen.sum(axis=0, dtype=jnp.int32)


def observe(
    survival: Survival,
    confidence: jax.Array,
    slots: jax.Array,
    num_drafts: tuple[jax.Array, jax.Array],
) -> Survival:
    """Counts a round's outcome, for drafts that were tested: the accepted ones and the first rejected one.

    Drafts after the first rejected one are not tested, and what is counted may depend on decided
    texts only.

    Args:
      confidence: [B, K] float32.
      slots: [B] int32; the dummy slot is not counted.
      num_drafts: numbers of verified and of accepted drafts, each [B] int32.
    """
    num_draft = confidence.shape[1]
    verified, accepted = (count[:, None] for count in num_drafts)
    dummy = survival.confidence.shape[0] - 1
    place = jnp.arange(num_draft)
    reached = (place < verified) & (place <= accepted) & (slots != dummy)[:, None]
    in_bin = bin_of(confidence)[..., None] == jnp.arange(BINS)
    count = lambda which: (which[..., None] & in_bin).sum(axis=0, dtype=jnp.float32)
    decayed = lambda old, new: old.at[:num_draft].set(_DECAY * old[:num_draft] + new)
    return survival._replace(
        reached=decayed(survival.reached, count(reached)),
        accepted=decayed(survival.accepted, count(reached & (place < accepted))),
    )


def report(survival: jax.Array, num_draft: jax.Array, verified: jax.Array) -> SurvivalReport:
    """The report of a round.

    Args:
      survival: [B, K] float32.
      num_draft: [B] int32, drafts that might be verified; 0 for padding rows.
      verified: [B] int32, drafts that were verified.
    """
    place = jnp.arange(survival.shape[1])
    expected = jnp.where(place < verified[:, None], survival, 0.0).sum()
    bins = jnp.minimum((survival * SURVIVAL_BINS).astype(jnp.int32), SURVIVAL_BINS - 1)
    is_draft = (place < num_draft[:, None])[..., None]
    in_bin = is_draft & (bins[..., None] == jnp.arange(SURVIVAL_BINS))
    sums = jnp.where(in_bin, survival[..., None], 0.0).sum(axis=0)
    return SurvivalReport(verified, expected, in_bin.sum(axis=0, dtype=jnp.int32), sums)


def observed(
    survival: Survival | None,
    plan: DecodePlan,
    start: jax.Array,
    num_drafts: tuple[jax.Array, jax.Array, jax.Array],
    num_draft: int,
) -> tuple[Survival | None, SurvivalReport | None]:
    """Counts the outcome of a round, and reports it; None if nothing is counted.

    Drafts of a round that was not counted have no confidence: they are neither counted nor in the histogram.

    Args:
      start: [B] int32, length of each sequence before the round.
      num_drafts: numbers of drafts of each sequence that might be verified, that were, and that were accepted, each
        [B] int32.
      num_draft: K.
    """
    if survival is None:
        return None, None
    may_verify, verified, accepted = num_drafts
    confidence = confidences(survival, plan, num_draft)
    is_known = survival.place[plan.slots] == start
    known = lambda count: jnp.where(is_known, count, 0)
    counted = observe(survival, confidence, plan.slots, (known(verified), accepted))
    return counted, report(survivals(survival, confidence), known(may_verify), verified)
