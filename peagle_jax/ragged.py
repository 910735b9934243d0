"""A ragged round: the target verifies R drafts in all instead of K of each sequence.

    select R of B * K drafts -> target on R + B flat rows -> accept -> drafter on [B, 2K] rows

A sequence verifies the first n_b of its drafts, with n_b chosen by `survival.select`, and 0 for a request
without drafts. Its later drafts count as not proposed (`verify`), so its last row draws the bonus token.
Embedding, norms, projections, experts and the output projection run over R + B rows. Attention and the
drafter run over [B, K+1] rows, where a row costs little.

Only the K and V of flat rows are written. Positions past a sequence's last row keep stale values, as those
of rejected drafts do: a round emits at most n_b + 1 tokens, so the next round overwrites these positions
before any row reads them. Padding rows write to the dummy page and the dummy slot.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from peagle_jax.adjust import Adjustments
from peagle_jax.cache import LayerCache, PagedAttention
from peagle_jax.drafter import Drafter
from peagle_jax.flat_rows import FlatRows
from peagle_jax.layers import AttentionRows
from peagle_jax.plan import DecodePlan
from peagle_jax.step import (
    AcceptRule,
    RoundInputs,
    State,
    StepOutput,
    Verified,
    finish_round,
    pack_output,
)
from peagle_jax.survival import confidences, observed, select, survivals
from peagle_jax.verify import verify


@dataclass(frozen=True)
class RaggedAttention:
    """`layers.Attend` over flat rows [F, 1]: each is written by itself, and they attend as [B, T] rows."""

    flat: PagedAttention  # of F sequences with one row each
    batch: PagedAttention  # of B sequences with T rows each
    rows: FlatRows

    @classmethod
    def of(
        cls, rows: FlatRows, plan: DecodePlan, start: jax.Array, dummy_slot: int
    ) -> "RaggedAttention":
        """The attention of a round over `rows`, with sequences of length `start` [B]."""
        sequence, is_real = rows.sequence, rows.is_real
        flat = PagedAttention(
            jnp.where(is_real[:, None], plan.page_table[sequence], 0),
            jnp.where(is_real, plan.slots[sequence], dummy_slot),
            (start[sequence] + rows.row)[:, None],
        )
        # Past the last row of a sequence its last row is computed again, so no row reads stale keys.
        positions = rows.batched(start[sequence] + rows.row)
        return cls(flat, PagedAttention(plan.page_table, plan.slots, positions), rows)

    def __call__(
        self,
        rows: AttentionRows,
        cache: LayerCache,
        *,
        window: int | None,
        scale: float,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache]:
        q, cache = self.flat.write(rows, cache)
        q = self.rows.batched(q[:, 0])
        out = self.batch.read(q, cache, window=window, scale=scale, sinks=sinks)
        return self.rows.flat(out)[:, None], cache


def ragged_step(
    target,
    drafter: Drafter,
    state: State,
    plan: DecodePlan,
    mask: jax.Array | None = None,
    *,
    num_rows: int,
    taps: tuple[int, ...] = (),
    max_logprobs: int = 0,
    accept: AcceptRule = verify,
) -> tuple[State, StepOutput]:
    """One round that verifies R = `num_rows` drafts, those with the largest survival.

    The arguments are those of `step.speculative_step`; K is the drafter's `num_draft`, at least 1. The
    state has `survival`. `accept` also takes `rows`, see `verify.verify`.
    """
    K = drafter.num_draft
    may_verify = RoundInputs.of(state, plan, K).params.num_draft
    survival = survivals(state.survival, confidences(state.survival, plan, K))
    chosen = select(survival, may_verify, num_rows)
    rules = dict(taps=taps, max_logprobs=max_logprobs, accept=accept)
    return verify_chosen(target, drafter, state, plan, chosen, mask, num_rows=num_rows, **rules)


def verify_chosen(
    target,
    drafter: Drafter,
    state: State,
    plan: DecodePlan,
    chosen: jax.Array,
    mask: jax.Array | None = None,
    *,
    num_rows: int,
    taps: tuple[int, ...] = (),
    max_logprobs: int = 0,
    accept: AcceptRule = verify,
) -> tuple[State, StepOutput]:
    """One round that verifies the first `chosen` [B] int32 drafts of each sequence.

    Their sum is at most R = `num_rows`, and none is above what the sequence may verify. How the numbers
    may depend on the drafts is said in `survival`; other arguments as in `ragged_step`.
    """
    K = drafter.num_draft
    inputs = RoundInputs.of(state, plan, K)
    may_verify = inputs.params.num_draft
    params = inputs.params._replace(num_draft=chosen)
    rows = FlatRows.of(chosen, num_rows + len(plan.slots), K)
    attend = RaggedAttention.of(rows, plan, inputs.start, state.length.shape[0] - 1)
    hidden, tapped, cache = target(
        rows.flat(inputs.tokens)[:, None],
        attend.flat.positions,
        state.target_cache,
        attend,
        taps=taps,
    )
    logits = target.unembed(hidden[:, 0])  # [F, V]
    given = (logits, inputs.drafts, inputs.draft_probs, inputs.positions + 1, params)
    adjustments = Adjustments(state.controls, plan.slots, plan.constrained, mask)
    verdict = accept(*given, adjustments, rows=rows)
    counts = (may_verify, chosen, verdict.count - 1)
    survival, report = observed(state.survival, plan, inputs.start, counts, K)
    state = replace(state, survival=survival)
    tapped = None if tapped is None else rows.batched(tapped[:, 0])
    inputs, verified = inputs._replace(params=params), Verified(verdict, tapped, cache)
    state, proposed = finish_round(target, drafter, state, plan, inputs, verified)
    output = pack_output(logits, verdict, proposed, params, max_logprobs, rows=rows, report=report)
    return state, output
