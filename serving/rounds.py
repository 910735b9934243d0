"""The rounds of a sequence as clients see them: texts of the tokens, and what the drafts were."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

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
      texts: of its output tokens. Joined over all rounds they are the sequence's text, with a stop
        string that ended it. A token that ends within a character has no text; the token that
        completes it has.
      accepted: number of output tokens that were drafts; they come first.
      draft_ids, drafts: ids and names of the drafts that the target verified.
    """

    texts: list[str]
    accepted: int
    draft_ids: list[int]
    drafts: list[str]


class RoundReports:
    """Reports the rounds of a request's sequences. One object per request, because it holds
    incomplete characters.

    The first report of a sequence is the token that prefill samples, which no round made: it has no
    drafts.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: defaultdict[int, Detokenizer] = defaultdict(lambda: Detokenizer(tokenizer))

    def of(self, index: int, delta: Delta) -> list[RoundReport]:
        """The rounds of the next delta of sequence `index`."""
        text = None if self._tokenizer is None else self._texts[index]
        name = partial(token_name, self._tokenizer)
        piece = name if text is None else lambda token: text.add([token])
        start, reports = 0, []
        sampled = len(delta.tokens) - sum(one.tokens for one in delta.rounds)
        by_prefill = [Round([], 0, sampled)] if sampled else []
        for one in by_prefill + delta.rounds:
            texts = [piece(token) for token in delta.tokens[start : start + one.tokens]]
            reports.append(
                RoundReport(texts, one.accepted, one.drafts, list(map(name, one.drafts)))
            )
            start += one.tokens
        if reports and delta.finish is not None and text is not None:
            reports[-1].texts[-1] += text.flush()
        return reports
