"""`/v1/completions`: OpenAI's route for plain text, one or several prompts."""

from typing import Annotated

from pydantic import FailFast, Field

from serving.errors import invalid
from serving.frontend import Frontend
from serving.http.dialect import OPENAI
from serving.http.fields import described, neutral
from serving.http.openai_answer import OpenAiAnswer
from serving.http.options import Options, SharedFields, check_model, read_options, read_params
from serving.http.reports import CompletionLogprobs, Rounds
from serving.http.route import Call, Caller, Encode, one_ask_each
from serving.stream import Ask, Delta

_SPELLING = {"stop_ids": "stop_token_ids"}
type _Ids = Annotated[list[int], FailFast()]
type _SomeIds = Annotated[_Ids, Field(min_length=1)]
type _Texts = Annotated[list[str], FailFast(), Field(min_length=1)]
type _Lists = Annotated[list[_Ids], FailFast(), Field(min_length=1)]
_Prompt = Annotated[
    str | _SomeIds | _Texts | _Lists,
    Field(union_mode="left_to_right"),
    described("must be a text, token ids, or a list of texts or of token ids"),
]


class CompletionFields(SharedFields):
    """Fields of a request."""

    prompt: _Prompt
    max_tokens: int = 16
    logprobs: int | None = None
    echo: neutral(False) = None
    suffix: neutral("") = None
    prompt_embeds: neutral() = None
    add_special_tokens: neutral(True) = None


class Completions:
    """The route over one frontend; see `Route`."""

    path = "/v1/completions"
    dialect = OPENAI

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def read(self, content: dict[str, object], caller: Caller) -> Encode:
        """See `Route`."""
        frontend = self._frontend
        check_model(content, frontend.name)
        fields = CompletionFields.read(content, frontend.limits)
        options = read_options(fields)
        spelling = dict(_SPELLING)
        params = read_params(
            fields,
            frontend.limits,
            max_tokens=fields.max_tokens,
            spelling=spelling,
            logprobs=fields.logprobs,
        )
        unencoded = _prompts(fields.prompt, frontend.limits.max_n // max(1, options.n))
        ask = Ask(
            request_id=caller.request_id,
            prompt=[],
            params=params,
            n=options.n,
            cache_salt=fields.cache_salt,
            priority=fields.priority,
            protocol="http",
            method=self.path,
            trace=caller.trace,
            spelling=spelling,
        )

        async def encode() -> Call:
            prompts = [
                one if isinstance(one, list) else await frontend.encode(one, field="prompt")
                for one in unencoded
            ]
            asks = one_ask_each(ask, prompts)
            answer = OpenAiAnswer(
                f"cmpl-{caller.request_id}",
                frontend.name,
                objects=("text_completion", "text_completion"),
                options=options,
                choices=_Choices(frontend, options, prompts),
                num_prompt=sum(map(len, prompts)),
            )
            return Call(asks=asks, answer=answer)

        return encode


def _prompts(prompt: str | list, most: int) -> list[str | list[int]]:
    """The prompts of a request, at most `most` of them."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > max(1, most):
        raise invalid("prompt", f"{len(prompt)} prompts of n sequences are too many")
    return prompt


class _Choices:
    """See `Choices`."""

    def __init__(self, frontend: Frontend, options: Options, prompts: list[list[int]]):
        self._tokenizer, self._options, self._prompts = frontend.tokenizer, options, prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._rounds = Rounds(frontend.tokenizer)

    def part(self, index: int, delta: Delta) -> dict:
        is_first = index not in self._logprobs
        if is_first:
            self._logprobs[index] = CompletionLogprobs(self._tokenizer)
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs[index].of(delta.tokens, delta.logprobs)
        finish = delta.finish
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": finish and finish.reason,
            "stop_reason": finish and finish.stop_reason,
        }
        if self._options.with_rounds:
            choice["rounds"] = self._rounds.of(index, delta)
        if self._options.with_ids:
            choice["token_ids"] = delta.tokens
            if is_first:
                choice["prompt_token_ids"] = self._prompts[index // self._options.n]
        return choice

    whole = part
