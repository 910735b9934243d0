"""Synthetic acceptance, for heads without training: the number of accepted drafts is random.

`synthetic_acceptance_length` has vLLM's name and meaning: the mean number of tokens that a round
emits, in 1..J+1. Length 3.1 accepts two drafts in every round and a third in one of ten,
independent of the drafts.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from peagle_jax.config import ConfigError
from peagle_jax.engine.device.program_descriptions import source_digest
from peagle_jax.method.adjust import Adjustments
from peagle_jax.method.drafter import Drafter, DraftInputs
from peagle_jax.method.plan import RequestParams
from peagle_jax.method.sampling import accept_uniforms, request_keys
from peagle_jax.method.step import AcceptRule
from peagle_jax.method.verify import Verdict, verify

_SOURCE = source_digest(__file__)
_PLACE_STRIDE, _SLOT_STRIDE = 7919, 104729  # primes


def synthetic_acceptance(length: float, num_draft: int) -> AcceptRule:
    """An acceptance rule for `peagle_jax.method.step`: accepts `length` - 1 drafts a round on
    average.

    The engine's own rule runs too, so that its time is included. Only its token of the target is
    used, after the accepted drafts. No more than a request's own number of drafts is accepted. Rows
    with controls or a mask have the engine's rule: they may forbid drafts.

    Args:
      length: mean tokens per round and sequence.
      num_draft: J of the engine.
    Raises:
      ConfigError: no rule over J drafts has this mean.
    """
    if not 1 <= length <= num_draft + 1:
        raise ConfigError(
            f"--synthetic-acceptance-length {length}: with K={num_draft} a round emits 1 to "
            f"{num_draft + 1} tokens"
        )
    return _Rule(length, f"{_SOURCE} length {length}")


@dataclass(frozen=True, eq=False)
class _Rule:
    """Accepts `length` - 1 drafts on average, as far as a row has them. It can be pickled.

    `program_key` tells the rules of this file apart: programs on disk belong to one of them.
    """

    length: float
    program_key: str

    def __call__(
        self,
        logits: jax.Array,  # [B, J+1, V]
        drafts: jax.Array,  # [B, J]; J is 0 in prefill
        draft_probs: jax.Array | None,
        positions: jax.Array,  # [B, J+1]
        params: RequestParams,
        adjustments: Adjustments | None = None,
    ) -> Verdict:
        verdict = verify(logits, drafts, draft_probs, positions, params, adjustments)
        drawn = jnp.take_along_axis(verdict.tokens, verdict.count[:, None] - 1, axis=1)  # [B, 1]
        uniform = accept_uniforms(request_keys(params), positions[:, :1])[:, 0]
        J = drafts.shape[1]
        whole = math.floor(self.length)
        wanted = whole - 1 + (uniform < self.length - whole)
        n = jnp.minimum(wanted, jnp.minimum(params.num_draft, J))
        padded = jnp.pad(drafts, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(J + 1) == n[:, None], drawn, padded)
        count = (n + 1).astype(jnp.int32)
        if adjustments is not None:
            is_adjusted = adjustments.wanted(params)
            tokens = jnp.where(is_adjusted[:, None], verdict.tokens, tokens)
            count = jnp.where(is_adjusted, verdict.count, count)
        return Verdict(tokens, count, verdict.finite)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scattered:
    """A drafter whose argmax drafts are shifted by an offset that depends on slot and position.

    A random head drafts nearly the same token in every mask row, and equal tokens choose equal
    experts: verification would read fewer weights than with real text. The shift is a few integer
    operations on [B, J]; the drafter's own work is unchanged. Sampled drafts are not shifted.
    """

    drafter: Drafter
    vocab_size: int = field(metadata=dict(static=True))
    num_draft: int = field(metadata=dict(static=True))
    program_key: ClassVar[str] = _SOURCE

    def propose(self, target, inputs: DraftInputs, cache: list):
        """As the drafter's own; `drafter.Drafter` states it."""
        drafter = replace(self.drafter, num_draft=self.num_draft)
        proposal, cache = drafter.propose(target, inputs, cache)
        if proposal.probs is not None:
            return proposal, cache
        place = (inputs.start + inputs.num_real)[:, None] + jnp.arange(self.num_draft)
        shift = (place * _PLACE_STRIDE + inputs.slots[:, None] * _SLOT_STRIDE) % self.vocab_size
        tokens = (proposal.tokens + shift) % self.vocab_size
        return proposal._replace(tokens=tokens.astype(jnp.int32)), cache

    def absorb(self, target, inputs: DraftInputs, cache: list) -> list:
        """As the drafter's own."""
        return self.drafter.absorb(target, inputs, cache)
