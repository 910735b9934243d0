"""Stores the log-probabilities of prompts that a prefill call has scored. No jax here."""

from typing import Any

from peagle_jax.engine.host.calls import PrefillCall
from peagle_jax.engine.host.request import PromptLogprob


def store_prompt_logprobs(call: PrefillCall, scores: Any) -> None:
    """Writes `scores` (`prompt_scores.PromptScores` of numpy arrays) to the requests that have
    `prompt_logprobs`."""
    for row, request in enumerate(call.requests):
        if request is None or request.is_finished or not request.wants_prompt_logprobs:
            continue
        start, n = int(call.plan.start[row]), request.params.prompt_logprobs
        count = min(int(call.plan.count[row]), len(request.prompt) - 1 - start)
        logprobs, ranks = scores.logprobs[row, :count], scores.ranks[row, :count]
        ids, top = scores.top_ids[row, :count, :n], scores.top_logprobs[row, :count, :n]
        each = zip(logprobs.tolist(), ranks.tolist(), ids.tolist(), top.tolist(), strict=True)
        for place, (logprob, rank, some, values) in enumerate(each, start + 1):
            alternatives = list(zip(some, values, strict=True))
            request.prompt_logprobs[place] = PromptLogprob(logprob, alternatives, rank)
