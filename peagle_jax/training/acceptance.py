"""Simulates a head's rounds over greedy texts on the host, with the engine's acceptance rule.

A round at slot a has x_0 .. x_{a+1} and drafts from x_{a+2}. It emits the correct drafts up to the
first wrong one, and one more token. A round is a repeat if its last tokens occurred earlier in the
text. Every head is good at repeats, so acceptance is also reported for the other, fresh rounds.
"""

from typing import NamedTuple

import jax
import numpy as np

from peagle_jax.training.stored_text import Text
from peagle_jax.training.weights import repeated


class Rounds(NamedTuple):
    """One entry per round, in order of text and slot."""

    text: np.ndarray
    slot: np.ndarray
    accepted: np.ndarray  # drafts
    emitted: np.ndarray  # tokens, one more than accepted

    def take(self, mask: np.ndarray) -> "Rounds":
        return Rounds(*(x[mask] for x in self))

    @property
    def acceptance_length(self) -> float:
        """Tokens per round; 0 without rounds."""
        return float(self.emitted.sum() / max(len(self.emitted), 1))


def walk(run: np.ndarray, prompt: np.ndarray, length: np.ndarray) -> Rounds:
    """Simulates the rounds of each text, from its first slot, prompt - 1.

    Args:
      run: [B, S] int, number of correct drafts before the first wrong one, of a round at each slot.
      prompt, length: [B], number of prompt tokens; number of prompt and generated tokens.
    """
    rounds = []
    for text, (row, first, last) in enumerate(zip(run, prompt - 1, length - 3, strict=True)):
        slot = int(first)
        while slot <= last:
            accepted = min(int(row[slot]), int(last) - slot)
            rounds.append((text, slot, accepted, accepted + 1))
            slot += accepted + 1
    return Rounds(*np.array(rounds, np.int64).reshape(-1, 4).T)


def leading(match: np.ndarray, num_draft: int) -> np.ndarray:
    """match [B, depths, S] -> number of correct drafts before the first wrong one, [B, S]."""
    return np.cumprod(match[:, :num_draft], axis=1).sum(axis=1)


@jax.jit
def _repeated(tokens: jax.Array) -> jax.Array:
    """`repeated`, text by text: its tables of pairs of positions are large."""
    return jax.lax.map(lambda row: repeated(row[None])[0], tokens)


def repeats(tokens: np.ndarray) -> np.ndarray:
    """Slots [B, S] at which a round would be a repeat: its newest token is the slot's next one."""
    return np.pad(np.asarray(_repeated(tokens))[:, 1:], ((0, 0), (0, 1)))


def lengths(match: np.ndarray, texts: Text, num_draft: int) -> dict[str, float]:
    """Tokens per round, of all and of fresh rounds, if the first texts were decoded with the head.

    Args:
      match: [B, depths, S] bool, the draft of anchor a at depth d equals the target's choice.
      texts: at least B greedy texts.
    """
    count = len(match)
    rounds = walk(leading(match, num_draft), texts.prompt[:count], texts.length[:count])
    fresh = rounds.take(~repeats(texts.tokens[:count])[rounds.text, rounds.slot])
    return dict(
        acceptance_length=rounds.acceptance_length,
        fresh_acceptance_length=fresh.acceptance_length,
    )
