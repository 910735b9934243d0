"""The result of one finished request, for callers of `Engine.generate`."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle_jax.engine.host.request import PromptLogprob, Request, TokenLogprob
from peagle_jax.text.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished request. `text` is None when the engine has no tokenizer.

    `finish_reason` is "stop", "length", "abort" or "error". With "error", `error` describes the
    failure in one sentence, and the tokens before it are valid.

    `drafted` counts the drafts that the target verified, `accepted` the drafts that became output,
    and `accepted_per_position[i]` the rounds in which draft i+1 became output, of the
    `drafted_per_position[i]` rounds that verified it. The number of `tokens` is
    1 + `rounds` + `accepted`, or one less if the text ends on a draft.

    `cached` is the number of prompt tokens that the prefix cache had.

    `versions` names the weights that wrote the tokens: (first token's index, version) of each part.

    `time_to_first_token` and `duration` are in seconds from arrival, time in the queue included.
    """

    prompt: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[PromptLogprob | None] | None
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    cached: int
    time_to_first_token: float
    duration: float
    error: str | None = None
    versions: list[tuple[int, str]]

    @property
    def emitted(self) -> int:
        """Number of tokens emitted by rounds: all but the first, which prefill samples."""
        return max(0, len(self.tokens) - 1)


def completion_of(
    request: Request, tokenizer: Tokenizer | None, eos_ids: Sequence[int]
) -> Completion:
    """Output of a finished request."""
    text = None
    if tokenizer is not None:
        params = request.params
        stops = params.stop if isinstance(request.stop_reason, str) else ()
        stream = TextStream(
            tokenizer,
            stops,
            tokenizer.shown(params, eos_ids),
            min_tokens=params.min_tokens,
            includes_stop=params.include_stop_str_in_output,
        )
        text = stream.add(request.output) + stream.finish()
    return Completion(
        prompt=request.prompt,
        tokens=request.output,
        text=text,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        rounds=request.rounds,
        drafted=request.drafted,
        accepted=request.accepted,
        accepted_per_position=request.accepted_per_position,
        drafted_per_position=request.drafted_per_position,
        cached=request.num_cached,
        # A request aborted before its first token has no first_token_time.
        time_to_first_token=(request.first_token_time or request.finish_time)
        - request.arrival_time,
        duration=request.finish_time - request.arrival_time,
        error=request.error,
        versions=request.versions,
    )
