"""Made-up drafts and times for `lossless`.

Drafts of a head with random weights are never right, so a drafter knows a share of the text. Times
are drawn, so that a choice of K changes in most rounds.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from peagle_jax.engine.device.program_descriptions import source_digest
from peagle_jax.engine.host.round_times import RoundTimes
from peagle_jax.method.drafter import Drafter, DraftInputs
from peagle_jax.method.sampling import accept_uniforms

KNOWN = 0.7
"""Share of drafts that `Oracle` takes from the reference: AL 2.5 with K = 3 and 3.1 with K = 7."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Oracle:
    """A drafter that replaces a random share of its head's drafts by the reference's tokens.

    The choice is random by request and position. A sequence is identified by its newest token and
    that token's position; if two sequences agree in both, a draft may come from the other and be
    wrong.
    """

    drafter: Drafter
    texts: jax.Array  # [R, L] int32: prompts with what follows them, by position
    num_draft: int = field(metadata=dict(static=True))

    program_key: ClassVar[str] = source_digest(__file__)

    def propose(self, target, inputs: DraftInputs, cache: list):
        """As the drafter's own; `drafter.Drafter` states it."""
        drafter = replace(self.drafter, num_draft=self.num_draft)
        proposal, cache = drafter.propose(target, inputs, cache)
        row = jnp.maximum(inputs.num_real - 1, 0)[:, None]
        newest = jnp.take_along_axis(inputs.tokens, row, axis=1)  # [B, 1]
        place = inputs.start[:, None] + row + 1  # [B, 1], the newest token's
        token_at = lambda text, place: self.texts[text, jnp.minimum(place, self.texts.shape[1] - 1)]
        text = jnp.argmax(token_at(jnp.arange(self.texts.shape[0]), place) == newest, axis=1)
        ahead = place + 1 + jnp.arange(self.num_draft)  # [B, J]
        known = accept_uniforms(inputs.keys, ahead) < KNOWN
        tokens = jnp.where(known, token_at(text[:, None], ahead), proposal.tokens)
        return proposal._replace(tokens=tokens), cache

    def absorb(self, target, inputs: DraftInputs, cache: list) -> list:
        """As the drafter's own."""
        return self.drafter.absorb(target, inputs, cache)


class RandomTimes(RoundTimes):
    """Every shape counts as timed, and gets another time whenever times are read."""

    def __init__(self):
        super().__init__()
        self._rng = random.Random(0)

    def untimed(self, shapes):
        return []

    def seconds(self, size: int, drafts: Collection[int]) -> dict[int, float]:
        # A factor of ten and more between two of them outweighs the tokens of their drafts.
        return {num_draft: self._rng.lognormvariate(0, 2) for num_draft in drafts}
