"""N-gram drafts: copies of what followed when the last tokens of a text occurred before (prompt lookup).

The device keeps the tokens of every request. After each call it looks for the latest place where the longest
suffix of a text occurred before. If the match has enough tokens, the drafts are the 15 tokens after it;
else the head drafts. Such a draft is a function of the text before it, so its law is a point mass, and
verification is exact for greedy and for sampled requests.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from peagle_jax.config import EngineConfig
from peagle_jax.exclusions import NGRAM_DRAFTS, NGRAM_LONGEST
from peagle_jax.method.drafter import Drafter, DraftInputs, Proposal
from peagle_jax.parallel import partition, vocabulary
from peagle_jax.parallel.shares import vocabulary_rows

NO_DRAFT = -1
"""Stands behind the last draft of a sequence that has fewer than `NgramDrafter.num_draft`."""


class History(NamedTuple):
    """Tokens of the requests; in front of the drafter's caches. Position 0 is left out."""

    tokens: jax.Array  # [S, L] int32, by slot and position

    def remember(self, inputs: DraftInputs) -> "History":
        """Writes the tokens of a call. Those past the end are dropped."""
        place = jnp.arange(inputs.tokens.shape[1])
        positions = inputs.start[:, None] + place + 1  # tokens are shifted by one
        is_real = place < inputs.num_real[:, None]
        positions = jnp.where(is_real, positions, self.tokens.shape[1])
        rows = inputs.slots[:, None], positions
        return History(self.tokens.at[rows].set(inputs.tokens, mode="drop"))


def init_history(config: EngineConfig) -> list[History]:
    """An empty history, if the engine drafts n-grams."""
    shape = (config.max_num_seqs + 1, config.max_model_len)
    return [History(jnp.zeros(shape, jnp.int32))] if config.ngram else []


def lookup(texts: jax.Array, newest: jax.Array, least: int) -> tuple[jax.Array, jax.Array]:
    """Copies what followed the latest of the longest earlier matches of each text's suffix.

    Where the text ends within the copy, the copy goes on from its own beginning: the text repeats itself. With
    the text 7 8 9 7 8 and `least` 2 the drafts are 9 7 8 9 7 8 ...

    Args:
      texts: [B, L] int32; position 0 and those after `newest` are not read.
      newest: [B] int32, position of the newest token.
      least: fewest tokens of a match. Matches of more than `NGRAM_LONGEST` tokens count as this long.
    Returns:
      (drafts [B, NGRAM_DRAFTS] int32, whether there is a match [B] bool).
    """
    L = texts.shape[1]
    end = jnp.arange(L)  # of a possible match
    matches = end < newest[:, None]
    length = jnp.zeros(texts.shape, jnp.int32)
    for back in range(NGRAM_LONGEST):
        last = jnp.take_along_axis(texts, jnp.maximum(newest[:, None] - back, 0), axis=1)
        earlier = jnp.pad(texts, ((0, 0), (back, 0)))[:, :L]
        matches &= (earlier == last) & (end > back)
        length += matches
    best = jnp.argmax(length * L + end, axis=1)  # the latest of the longest
    has_match = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0] >= least
    ahead = jnp.arange(NGRAM_DRAFTS) % jnp.maximum(newest - best, 1)[:, None]
    drafts = jnp.take_along_axis(texts, jnp.minimum(best[:, None] + 1 + ahead, L - 1), axis=1)
    return drafts, has_match


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NgramDrafter:
    """`drafter.Drafter`: n-gram drafts where the text has a match, else those of a head, if there is one."""

    head: Drafter | None
    least: int = field(metadata=dict(static=True))
    sampled_vocab: int = field(metadata=dict(static=True))
    """V if drafts come with their laws, else 0."""
    num_draft: int = field(default=NGRAM_DRAFTS, metadata=dict(static=True))

    def propose(self, target, inputs: DraftInputs, cache: list):
        history, *cache = cache
        own = Proposal(jnp.zeros((len(inputs.slots), 0), jnp.int32), None)
        if self.head is not None:
            own, cache = self.head.propose(target, inputs, cache)
        history = history.remember(inputs)
        newest = inputs.start + inputs.num_real
        drafts, has_match = lookup(history.tokens[inputs.slots], newest, self.least)
        return self._combined(own, drafts, has_match), [history, *cache]

    def _combined(self, own: Proposal, drafts: jax.Array, has_match: jax.Array) -> Proposal:
        missing = ((0, 0), (0, self.num_draft - own.tokens.shape[1]))
        tokens = jnp.pad(own.tokens, missing, constant_values=NO_DRAFT)
        tokens = jnp.where(has_match[:, None], drafts, tokens)
        if not self.sampled_vocab:
            return Proposal(tokens, None)
        width = vocabulary_rows(self.sampled_vocab, partition.size())
        probs = certain = vocabulary.one_hot(drafts, width, jnp.float32)
        if own.probs is not None:
            probs = jnp.pad(own.probs, (*missing, (0, 0)))
        return Proposal(tokens, jnp.where(has_match[:, None, None], certain, probs))
