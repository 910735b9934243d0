"""Simulates a head's rounds over greedy texts on the host, with the engine's acceptance rule.

A round at slot a has x_0 .. x_{a+1} and drafts from x_{a+2}. It emits the correct drafts up to the
first wrong one, and one more token. A round is a repeat if its last tokens occurred earlier in the text.
Every head is good at repeats, so acceptance is also reported for the other ("fresh") rounds.
"""

from typing import NamedTuple

import numpy as np

REPEAT = 8
"""Number of last tokens that must have occurred earlier for a round to count as a repeat."""


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
      run: [B, S] int, number of correct drafts before the first wrong one, for a round at each slot.
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


class Earlier(NamedTuple):
    """For every position p of a text: the longest suffix of x_0 .. x_p that also ends earlier."""

    length: np.ndarray  # [S] int; 0 if x_p does not occur earlier
    end: np.ndarray  # [S] int, end of the latest such occurrence


def earlier(tokens: np.ndarray) -> Earlier:
    """Longest earlier match of every suffix; tokens [S]."""
    S = len(tokens)
    length, end = np.zeros(S, np.int64), np.zeros(S, np.int64)
    above = np.zeros(S + 1, np.int64)  # of position p - 1 with position j - 1, shifted by one
    for p in range(S):
        run = np.zeros(S + 1, np.int64)
        run[1 : p + 1] = (above[:p] + 1) * (tokens[:p] == tokens[p])
        if p:
            end[p] = p - 1 - np.argmax(run[p:0:-1])
            length[p] = run[end[p] + 1]
        above = run
    return Earlier(length, end)


def repeats(matches: list[Earlier], num_slots: int) -> np.ndarray:
    """Slots [B, num_slots] at which a round would be a repeat."""
    out = np.zeros((len(matches), num_slots), bool)
    for row, one in zip(out, matches, strict=True):
        row[: len(one.length) - 1] = one.length[1:] >= REPEAT
    return out


def ngram_run(
    tokens: np.ndarray, earlier: Earlier, *, min_match: int, num_draft: int
) -> tuple[np.ndarray, np.ndarray]:
    """Baseline: n-gram drafts copied from the text itself (prompt lookup), at every slot.

    A round at slot a finds the longest suffix of x_0 .. x_{a+1} that also ends earlier. If it has at
    least `min_match` tokens, the drafts are the tokens after the earlier occurrence, up to `num_draft`.

    Returns:
      (number of correct drafts before the first wrong one [S], whether there was a match [S]).
    """
    S = len(tokens)
    right, matched = np.zeros(S, np.int64), np.zeros(S, bool)
    matched[: S - 1] = earlier.length[1:] >= min_match
    for slot in np.flatnonzero(matched):
        known = slot + 2
        start = earlier.end[slot + 1] + 1
        copied = tokens[start : min(start + num_draft, known)]
        true = tokens[known : known + len(copied)]
        wrong = np.flatnonzero(copied[: len(true)] != true)
        right[slot] = wrong[0] if len(wrong) else len(true)
    return right, matched


def acceptance_length(
    match: np.ndarray, prompt: np.ndarray, length: np.ndarray, num_draft: int
) -> float:
    """Tokens per round if these greedy texts were decoded with the head.

    Args:
      match: [B, depths, S] bool, the draft of anchor a at depth d equals the target's choice.
    """
    return walk(leading(match, num_draft), prompt, length).acceptance_length
