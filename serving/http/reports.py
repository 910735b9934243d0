"""Parts of an answer beside its text: log-probabilities, usage, counts of speculation."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from peagle_jax.config import FIRST_VERSION
from peagle_jax.engine.host.request import PromptLogprob, TokenLogprob
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.text.tokenizer import Detokenizer, Tokenizer
from serving.messages import Ended
from serving.rounds import RoundReport, token_name
from serving.stream import Stream
from serving.turns import Later

Scored = TokenLogprob | PromptLogprob

_LOWEST = -9999.0  # in place of minus infinity, which JSON does not have; vLLM uses the same number


class CompletionLogprobs:
    """Makes `logprobs` of completions. One object per sequence, because it counts text offsets.

    Args:
      shown: ids of special tokens that are part of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, shown: Collection[int] = frozenset()):
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, shown) if tokenizer else None
        self._offset = 0

    def of(
        self, tokens: Sequence[int], logprobs: Sequence[Scored | None], num_top: int | None = None
    ) -> dict:
        """The object for the next tokens, at most `num_top` alternatives each; null for a token
        without log-probabilities.

        The lists are `Later`: encode them before the next call, which changes `text_offset`.
        """
        name = lambda token: token_name(self._tokenizer, token)
        pairs = zip(tokens, logprobs, strict=True)
        lists = {
            "tokens": (name(token) for token in tokens),
            "token_logprobs": (one and _finite(one.logprob) for one in logprobs),
            "top_logprobs": (self._top(token, one, num_top) for token, one in pairs),
            "text_offset": (self._next_offset(token) for token in tokens),
        }
        return {key: Later(items, len(tokens)) for key, items in lists.items()}

    def _top(self, token: int, one: Scored | None, most: int | None) -> dict[str, float] | None:
        """Log-probabilities of the alternatives and of the token itself, by name."""
        if one is None:
            return None
        logprobs: dict[str, float] = {}
        for other, logprob in (*one.top[:most], (token, one.logprob)):
            # Tokens that are parts of characters can have the same name: the likeliest one is
            # reported.
            logprobs.setdefault(token_name(self._tokenizer, other), _finite(logprob))
        return logprobs

    def _next_offset(self, token: int) -> int:
        before = self._offset
        if self._text is not None:
            self._offset += len(self._text.add([token]))
        return before


def prompt_logprobs(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    logprobs: Sequence[PromptLogprob | None],
    num_top: int,
) -> Later[dict | None]:
    """`prompt_logprobs` of a choice, as vLLM forms it: for each token the alternatives and itself,
    by id.
    """

    def entry(token: int, logprob: float, rank: int) -> dict:
        return {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": token_name(tokenizer, token),
        }

    def one_place(token: int, one: PromptLogprob) -> dict[str, dict]:
        ranked = enumerate(one.top[:num_top], 1)
        entries = {str(other): entry(other, logprob, rank) for rank, (other, logprob) in ranked}
        return {str(token): entry(token, one.logprob, one.rank)} | entries

    pairs = zip(prompt, logprobs, strict=True)
    return Later((one and one_place(token, one) for token, one in pairs), len(prompt))


def rounds(reports: Sequence[RoundReport]) -> list[dict]:
    """`rounds` of a choice."""
    return [
        dict(tokens=len(one.texts), accepted=one.accepted, drafts=one.drafts, texts=one.texts)
        for one in reports
    ]


def chat_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> dict:
    """`logprobs` of chats, for every token, also those that are not part of the content."""

    def entry(token: int, logprob: float) -> dict:
        written = b"" if tokenizer is None else tokenizer.bytes_of(token)
        name = token_name(tokenizer, token)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(written)}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for token, one in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content}


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict:
    """Usage of a stream before its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def final_usage(streams: Sequence[Stream]) -> dict:
    """Usage over all sequences of all prompts; drafts are counted as OpenAI counts predictions."""
    usages = [stream.usage() for stream in streams]
    counts = Acceptance.of(_requests(streams))
    usage = running_usage(
        sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
    )
    usage["prompt_tokens_details"] = {"cached_tokens": sum(one.cached_tokens for one in usages)}
    usage["completion_tokens_details"] = {
        "accepted_prediction_tokens": counts.accepted,
        "rejected_prediction_tokens": counts.drafted - counts.accepted,
    }
    versions = list(dict.fromkeys(version for one in usages for version in one.versions))
    if versions not in ([], [FIRST_VERSION]):
        usage["weights_versions"] = versions
    return usage


def speculation(streams: Sequence[Stream]) -> dict:
    """vLLM's block about the drafts of a sequence; empty for several sequences, or
    without drafts.
    """
    requests = _requests(streams)
    if len(requests) != 1 or not requests[0].drafted:
        return {}
    counts = Acceptance.of(requests)
    # Accepted drafts are a prefix, so a round accepted exactly i drafts if it accepted draft i but
    # not the next.
    at_least = (counts.rounds, *counts.per_position, 0)
    block = {
        "mean_acceptance_length": counts.length,
        "draft_acceptance_rate": counts.accepted / counts.drafted,
        "acceptance_histogram": [now - after for now, after in pairwise(at_least)],
        "num_spec_steps": counts.rounds,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
        "num_spec_tokens": requests[0].num_draft,
    }
    return {"metrics": {"speculative_decoding": block}}


def _requests(streams: Sequence[Stream]) -> list[Ended]:
    return [request for stream in streams for request in stream.requests]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
