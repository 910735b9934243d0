"""The rounds of a sequence as clients see them: texts of the tokens, and what the drafts were."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle_jax.engine.host.request import Round
from peagle_jax.text.tokenizer import Detokenizer, Tokenizer
from serving.stream import Delta


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """The name of a token in a report."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.name_of(token)


@dataclass(frozen=True)
class RoundReport:
    """One round of a sequence.

    Attributes:
      texts: of its output tokens. Joined over all rounds they are the sequence's text, with a stop string
        that ended it. A token that ends within a character has no text; the token that completes it has.
      accepted: number of output tokens that were drafts; they come first.
      draft_ids, drafts: ids and names of the drafts that the target verified.
    """

    texts: list[str]
    accepted: int
    draft_ids: list[int]
    drafts: list[str]


class RoundReports:
    """Reports the rounds of one sequence. One object per sequence, because it holds incomplete characters.

    The first report of a sequence is the token that prefill samples, which no round made: it has no drafts.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else Detokenizer(tokenizer)

    def of(self, delta: Delta) -> list[RoundReport]:
        """The rounds of the sequence's next delta."""
        start, reports = 0, []
        sampled = len(delta.tokens) - sum(one.tokens for one in delta.rounds)
        by_prefill = [Round([], 0, sampled)] if sampled else []
        for one in by_prefill + delta.rounds:
            end = start + one.tokens
            reports.append(self._report(one, delta.tokens[start:end]))
            start = end
        if reports and delta.finish is not None and self._text is not None:
            reports[-1].texts[-1] += self._text.flush()
        return reports

    def _report(self, one: Round, tokens: Sequence[int]) -> RoundReport:
        return RoundReport(
            texts=[self._piece(token) for token in tokens],
            accepted=one.accepted,
            draft_ids=one.drafts,
            drafts=[token_name(self._tokenizer, token) for token in one.drafts],
        )

    def _piece(self, token: int) -> str:
        if self._text is None:
            return token_name(None, token)
        return self._text.add([token])
