"""The core of the engine: one speculative round, and the prefill that starts a sequence.

    target on [B, J+1] rows -> accept -> drafter on [B, 2J] rows -> the next J drafts

Both functions are pure: `(target, drafter, state, plan) -> (state, output)`. The target, the
drafter and the acceptance rule are arguments. The engine compiles the round once per batch bucket,
with the state donated. A round has a K of its own, the drafter's `num_draft`, at most the J drafts
that the state has room for. K = 0 is plain decoding: without a drafter, or with one that only
writes its cache, so that a later round can draft again.

Invariant between rounds, for a sequence with tokens x_0..x_c: `length` = c, the target's and the
drafter's cache hold positions 0..c-1, `last_token` = x_c is not in the cache yet, and `drafts` are
proposals for x_{c+1}..x_{c+K}, K of the round before. Later drafts are stale.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.config import ConfigError, DrafterConfig, EngineConfig, TargetConfig
from peagle_jax.method.adjust import Adjustments, Controls, count_tokens, init_controls
from peagle_jax.method.drafter import Drafter, DraftInputs, absorbed
from peagle_jax.method.plan import DecodePlan, PrefillPlan, RequestParams, idle_params
from peagle_jax.method.prompt_scores import PromptScores, score_prompt
from peagle_jax.method.sampling import request_keys
from peagle_jax.method.token_scores import Scores, sampled_logits, score_rows
from peagle_jax.method.verify import Verdict, verify
from peagle_jax.models.cache import LayerCache, PagedAttention, init_cache
from peagle_jax.parallel import vocabulary
from peagle_jax.parallel.shares import vocabulary_rows

AcceptRule = Callable[..., Verdict]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Device state between calls, one row per slot; S = max_num_seqs + 1, the last slot is a
    dummy."""

    target_cache: list[LayerCache]
    drafter_cache: list[LayerCache]
    length: jax.Array  # [S] int32
    last_token: jax.Array  # [S] int32
    drafts: jax.Array  # [S, J] int32
    draft_probs: jax.Array | None  # [S, J, V] float32, only when drafts are sampled
    params: RequestParams
    controls: Controls | None  # None in a round without a branch, see `speculative_step`
    links: jax.Array | None = (
        None  # [n, LINKS] int32, tables of `pallas_kernels.peer_gather`, if it is used
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Output of a call, for the host."""

    packed: jax.Array  # [B, K+2] int32: tokens [B, K+1] and count [B], see `_signed_count`
    drafts: jax.Array  # [B, K] int32, proposals for the positions after the emitted tokens
    logprobs: jax.Array | None = None  # [B, K+1] float32, of the emitted tokens
    top_ids: jax.Array | None = None  # [B, K+1, n] int32
    top_logprobs: jax.Array | None = None  # [B, K+1, n] float32
    prompt: PromptScores | None = None  # of a prefill call that scores
    replicas: jax.Array | None = None  # [n] uint32, `parallel.replicas`; only if checked


def init_state(target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig) -> State:
    """An empty state: zeroed caches, idle slots; with several devices the arrays of all."""
    S, J, n = config.max_num_seqs + 1, config.num_draft, config.tensor_parallel
    cache = lambda c: init_cache([c.attention(i) for i in range(c.num_layers)], config)
    width = n * vocabulary_rows(target.vocab_size, n)
    sampled = config.draft_sampling == "sample" and J > 0
    return State(
        target_cache=cache(target),
        drafter_cache=[] if drafter is None else cache(drafter),
        length=jnp.zeros(S, jnp.int32),
        last_token=jnp.zeros(S, jnp.int32),
        drafts=jnp.zeros((S, J), jnp.int32),
        draft_probs=jnp.zeros((S, J, width), jnp.float32) if sampled else None,
        params=jax.tree.map(jnp.array, idle_params(S)),
        controls=init_controls(S, target.vocab_size),
    )


def _scored(
    verdict: Verdict,
    logits: jax.Array,
    params: RequestParams,
    max_logprobs: int,
    sampled: Callable[[], jax.Array],
) -> tuple[Verdict, Scores | None]:
    """The verdict over logits [B, T, V], and the scores of its tokens, computed only if some row
    asks for them; None in rounds of `plan.greedy_only`.

    What updates the controls must use this verdict: it waits for the scores, which read them.
    Otherwise XLA copies the controls of all slots in every call.

    Args:
      sampled: as in `score_rows`.
    """
    if params.scored is None:
        return verdict, None
    scores = score_rows(logits, verdict.tokens, params.scored, max_logprobs, sampled)
    return lax.optimization_barrier((verdict, scores))


def pack_output(verdict: Verdict, drafts: jax.Array, scores: Scores | None) -> StepOutput:
    """Packs the verdict, the next drafts [B, K] and the scores."""
    packed = jnp.concatenate([verdict.tokens, _signed_count(verdict)[:, None]], axis=1)
    return StepOutput(packed, drafts, *(scores or ()))


def _signed_count(verdict: Verdict) -> jax.Array:
    """[B] int32: number of emitted tokens, or -1 - n if only the first n come from finite logits.

    Example: finite = [True, False, True]. Count 1 stays 1, because row 1 emits no token; counts 2
    and 3 become -2.
    """
    if verdict.finite is None:
        return verdict.count
    num_finite = jnp.cumprod(verdict.finite.astype(jnp.int32), axis=1).sum(axis=1)
    return jnp.where(num_finite < verdict.count, -1 - num_finite, verdict.count)


def _draft(target, drafter: Drafter, state: State, inputs: DraftInputs) -> tuple[State, jax.Array]:
    """Runs the drafter over the rows of a call. Stores its drafts in the state; returns them, [B,
    K]."""
    K = drafter.num_draft
    if K == 0:
        cache = absorbed(drafter, target, inputs, state.drafter_cache)
        return replace(state, drafter_cache=cache), _no_drafts(inputs.slots)
    proposal, cache = drafter.propose(target, inputs, state.drafter_cache)
    # Greedy requests' drafts are verified without their law, so it may be an older one.
    probs = state.draft_probs
    is_drawn = probs is not None and inputs.temperature is not None
    _check_proposal(proposal, (len(inputs.slots), K), probs if is_drawn else None)
    drafts = state.drafts.at[inputs.slots, :K].set(proposal.tokens)
    if is_drawn:
        law = proposal.probs
        if law is None:  # a drafter that is certain of its drafts
            law = vocabulary.one_hot(proposal.tokens, probs.shape[-1], probs.dtype)
        probs = probs.at[inputs.slots, :K].set(law)
    state = replace(state, drafter_cache=cache, drafts=drafts, draft_probs=probs)
    return state, proposal.tokens


def _check_proposal(proposal, shape: tuple[int, int], kept: jax.Array | None) -> None:
    """Raises ConfigError for drafts that a drafter of the user's own returns in another shape."""
    if proposal.tokens.shape != shape or proposal.tokens.dtype != jnp.int32:
        found = f"{proposal.tokens.dtype}{list(proposal.tokens.shape)}"
        raise ConfigError(f"the drafter proposes tokens {found}: they must be int32{list(shape)}")
    if kept is None or proposal.probs is None:
        return
    wanted, found = [*shape, kept.shape[-1]], list(proposal.probs.shape)
    if found != wanted:
        raise ConfigError(f"the drafter proposes probs {found}: they must be {wanted}, or None")


def _no_drafts(slots: jax.Array) -> jax.Array:
    """[B, 0] int32."""
    return jnp.zeros((slots.shape[0], 0), jnp.int32)


def _stored_drafts(
    state: State, plan: DecodePlan, num_draft: int
) -> tuple[jax.Array, jax.Array | None]:
    """Drafts [B, K] of a round with the plan's forced ones, and the law [B, K, V] that sampled ones
    have."""
    drafts = state.drafts[plan.slots, :num_draft]
    if plan.forced is None:
        return drafts, None  # a round of greedy requests without constrained rows
    forced = plan.forced[:, :num_draft]
    is_forced = forced >= 0
    drafts = jnp.where(is_forced, forced, drafts)
    if state.draft_probs is None:
        return drafts, None
    probs = state.draft_probs[plan.slots, :num_draft]
    certain = vocabulary.one_hot(drafts, probs.shape[-1], probs.dtype)
    return drafts, jnp.where(is_forced[..., None], certain, probs)


def _advance(state: State, slots, length, last_token) -> State:
    """Stores the new lengths and last tokens; the dummy slot stays at length 0."""
    dummy = state.length.shape[0] - 1
    length = jnp.where(slots == dummy, 0, length)
    return replace(
        state,
        length=state.length.at[slots].set(length),
        last_token=state.last_token.at[slots].set(last_token),
    )


class RoundInputs(NamedTuple):
    """The part of the state that a round of B sequences with K drafts reads."""

    params: RequestParams  # `num_draft`: drafts that may be verified, at most K
    start: jax.Array  # [B] int32, length of each sequence
    drafts: jax.Array  # [B, K] int32
    draft_probs: jax.Array | None  # [B, K, V] float32
    tokens: jax.Array  # [B, K+1] int32, the newest token and the drafts
    positions: jax.Array  # [B, K+1] int32

    @classmethod
    def of(cls, state: State, plan: DecodePlan, num_draft: int) -> Self:
        """Gathers the rows of `plan`, for K = `num_draft`."""
        slots, K = plan.slots, num_draft
        params = jax.tree.map(lambda x: x[slots], state.params)
        may_verify = jnp.minimum(params.num_draft, jnp.minimum(plan.pending, K))
        newest, timed = state.last_token[slots], plan.newest
        if timed is not None:
            may_verify = jnp.where(timed < 0, may_verify, K)
            newest = jnp.where(timed < 0, newest, timed)
        start = state.length[slots]
        drafts, draft_probs = _stored_drafts(state, plan, K)
        return cls(
            params=params._replace(num_draft=may_verify),
            start=start,
            drafts=drafts,
            draft_probs=draft_probs,
            tokens=jnp.concatenate([newest[:, None], drafts], axis=1),
            positions=start[:, None] + jnp.arange(K + 1),
        )


class Verified(NamedTuple):
    """Result of the target's pass of a round."""

    verdict: Verdict
    taps: jax.Array | None  # [B, K+1, A*D]
    cache: list[LayerCache]


def finish_round(
    target,
    drafter: Drafter | None,
    state: State,
    plan: DecodePlan,
    inputs: RoundInputs,
    verified: Verified,
) -> tuple[State, jax.Array]:
    """Advances the sequences by the emitted tokens. Returns the state and the next drafts [B,
    K]."""
    verdict = verified.verdict
    last = jnp.take_along_axis(verdict.tokens, verdict.count[:, None] - 1, axis=1)[:, 0]
    state = _advance(state, plan.slots, inputs.start + verdict.count, last)
    emitted = (verdict.tokens, verdict.count)
    counted = count_tokens(state.controls, plan.slots, *emitted, inputs.params.adjusts)
    state = replace(state, target_cache=verified.cache, controls=counted)
    if drafter is None:
        return state, _no_drafts(plan.slots)
    draft_inputs = DraftInputs(
        # The emitted tokens are the drafter's shifted input: row j holds x_{c+j+1}.
        tokens=verdict.tokens,
        taps=verified.taps,
        num_real=verdict.count,
        start=inputs.start,
        page_table=plan.page_table,
        slots=plan.slots,
        keys=request_keys(inputs.params),
        temperature=inputs.params.temperature,
    )
    return _draft(target, drafter, state, draft_inputs)


def speculative_step(
    target,
    drafter: Drafter | None,
    state: State,
    plan: DecodePlan,
    mask: jax.Array | None = None,
    *,
    taps: tuple[int, ...] = (),
    max_logprobs: int = 0,
    accept: AcceptRule = verify,
) -> tuple[State, StepOutput]:
    """One round: verify the stored drafts, emit 1..K+1 tokens per sequence, draft the next K.

    Example with K = 3 and two accepted drafts: the target's input is [x_c, d1, d2, d3] at positions
    c..c+3; the verdict is [d1, d2, n, .] with count 3; the drafter's input is [d1, d2, n, mask,
    mask, pad] at slots c..c+5, and its rows 2, 3, 4 predict the next three drafts.

    Stale drafts (`plan.pending`) are not verified. They follow an older text, so they are rarely
    right. A drafter that draws all drafts of a position with one random key would even change the
    law: the text may have taken a later draft for the position of a stale one, and the two are not
    independent.

    A batch of greedy requests without logprobs and controls needs no branch. Its round is compiled
    with `plan.greedy_only` parameters, without controls, and with a plan without constrained rows.

    Args:
      target: model with the signature of `models.Decoder`.
      drafter: see `drafter.Drafter`; its `num_draft` is K. None is plain decoding.
      state: donated by the engine.
      plan: B slots; padding rows have the dummy slot and the dummy page.
      mask: [B, K+1, mask_words(V)] int32, allowed tokens of the constrained rows (see `plan`); None
        if no plan has a constrained row.
      taps: the drafter's tap ids.
      max_logprobs: n, alternatives per token.
      accept: acceptance rule with the signature of `verify.verify`.
    """
    K = 0 if drafter is None else drafter.num_draft
    inputs = RoundInputs.of(state, plan, K)
    params, positions = inputs.params, inputs.positions
    attend = PagedAttention(plan.page_table, plan.slots, positions)
    hidden, tapped, cache = target(inputs.tokens, positions, state.target_cache, attend, taps=taps)
    logits = target.unembed(hidden)  # [B, K+1, V]
    adjustments = Adjustments.of(state.controls, plan.slots, plan.constrained, mask)
    verdict = accept(logits, inputs.drafts, inputs.draft_probs, positions + 1, params, adjustments)
    law = partial(sampled_logits, logits, inputs.drafts, positions + 1, params, adjustments)
    verdict, scores = _scored(verdict, logits, params, max_logprobs, law)
    verified = Verified(verdict, tapped, cache)
    state, proposed = finish_round(target, drafter, state, plan, inputs, verified)
    return state, pack_output(verdict, proposed, scores)


def prefill(
    target,
    drafter: Drafter | None,
    state: State,
    plan: PrefillPlan,
    mask: jax.Array | None = None,
    *,
    taps: tuple[int, ...] = (),
    max_logprobs: int = 0,
    accept: AcceptRule = verify,
    scores: bool = False,
) -> tuple[State, StepOutput]:
    """Prefills one chunk per row. The last chunk of a prompt also emits the first token, and
    drafts.

    The drafter prefills the same positions. Its slot p needs x_{p+1}: the next token of the chunk,
    at the chunk's end `plan.next_token`, and at the prompt's end the token just sampled.

    Args:
      scores: whether to report log-probabilities of the prompt's tokens; other arguments as in
        `speculative_step`.
    Returns:
      The state, and an output with one token per row. `count` is 0 where no token was sampled.
    """
    slots, page_table, params = plan.slots, plan.page_table, plan.params
    T = plan.tokens.shape[1]
    positions = plan.start[:, None] + jnp.arange(T)
    attend = PagedAttention(page_table, slots, positions)
    last_row = jnp.maximum(plan.count - 1, 0)[:, None]  # [R, 1]
    keep = None if scores else last_row
    hidden, tapped, target_cache = target(
        plan.tokens, positions, state.target_cache, attend, taps=taps, keep=keep
    )
    last = jnp.take_along_axis(hidden, last_row[..., None], axis=1) if scores else hidden
    logits = target.unembed(last)
    proposed = _no_drafts(slots)
    decided = (plan.start + plan.count)[:, None]  # [R, 1] position of the token after the chunk
    adjustments = Adjustments(state.controls, slots, plan.constrained, mask)
    verdict = accept(logits, proposed, None, decided, params, adjustments)
    law = partial(sampled_logits, logits, proposed, decided, params, adjustments)
    verdict, first_scores = _scored(verdict, logits, params, max_logprobs, law)
    ends = plan.next_token < 0
    count = jnp.where(ends & (plan.count > 0), 1, 0)
    following = jnp.where(ends, verdict.tokens[:, 0], plan.next_token)

    state = _advance(state, slots, plan.start + plan.count, following)
    state = replace(
        state,
        target_cache=target_cache,
        controls=count_tokens(state.controls, slots, verdict.tokens, count, params.adjusts),
        params=jax.tree.map(lambda all_, new: all_.at[slots].set(new), state.params, params),
    )
    shifted = jnp.pad(plan.tokens[:, 1:], ((0, 0), (0, 1)))
    shifted = jnp.where(jnp.arange(T) == last_row, following[:, None], shifted)
    if drafter is not None:
        inputs = DraftInputs(
            tokens=shifted,
            taps=tapped,
            num_real=plan.count,
            start=plan.start,
            page_table=page_table,
            slots=slots,
            keys=request_keys(params),
            temperature=params.temperature,
        )
        state, proposed = _draft(target, drafter, state, inputs)
    output = pack_output(verdict._replace(count=count), proposed, first_scores)
    if scores:
        prompt = score_prompt(target.unembed, hidden, shifted, max_logprobs)
        output = replace(output, prompt=prompt)
    return state, output
