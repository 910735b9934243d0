"""Rounds of a head over greedy texts, walked on the host as the engine would walk them.

A round at slot a knows x_0 .. x_{a+1} and drafts x_{a+2} and on. It emits the leading run of right
drafts and one more token. A round is a repeat if its last tokens occurred before in the same text;
there every head is good, so acceptance is also stated for the other, fresh rounds.
"""

from typing import NamedTuple

import numpy as np

REPEAT = 8
"""Known tokens that must have occurred before for a round to count as a repeat."""


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
    """Walks texts from their first slot, prompt - 1.

    Args:
      run: [B, S] int, drafts of a round at slot a that are right, counted up to the first wrong one.
      prompt, length: [B], tokens given; tokens given and written.
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
    """match [B, depths, S] -> right drafts up to the first wrong one, [B, S]."""
    return np.cumprod(match[:, :num_draft], axis=1).sum(axis=1)


class Earlier(NamedTuple):
    """For every position p of a text: the longest run of tokens that ends at p and ended before."""

    length: np.ndarray  # [S] int; 0 if x_p never occurred before
    end: np.ndarray  # [S] int, where the newest of the longest ended


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


def repeats(found: list[Earlier], num_slots: int) -> np.ndarray:
    """Slots [B, num_slots] at which a round would be a repeat."""
    out = np.zeros((len(found), num_slots), bool)
    for row, one in zip(out, found, strict=True):
        row[: len(one.length) - 1] = one.length[1:] >= REPEAT
    return out


def ngram_run(
    tokens: np.ndarray, found: Earlier, *, min_match: int, num_draft: int
) -> tuple[np.ndarray, np.ndarray]:
    """What drafts copied from the text itself are worth at every slot.

    A round at slot a looks for the longest run that ends at x_{a+1} and ended before; if it has at least
    `min_match` tokens, it drafts the tokens after the earlier one, at most `num_draft`.

    Returns:
      (right drafts up to the first wrong one [S], whether there was a match [S]).
    """
    S = len(tokens)
    right, matched = np.zeros(S, np.int64), np.zeros(S, bool)
    matched[: S - 1] = found.length[1:] >= min_match
    for slot in np.flatnonzero(matched):
        known = slot + 2
        start = found.end[slot + 1] + 1
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
