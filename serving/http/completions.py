"""`/v1/completions`: OpenAI's route for plain text, one or several prompts."""

from serving.frontend import Frontend
from serving.http.fields import Fields, is_integer
from serving.http.options import LABELS, Options, read_options, read_params
from serving.http.reports import CompletionLogprobs
from serving.http.route import Call, Caller, Encode, one_ask_each
from serving.stream import Ask, Delta

_MAX_TOKENS = 16  # OpenAI's default
_SPELLING = {"stop_ids": "stop_token_ids"}
_NEUTRAL = {
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


class Completions:
    """The route over one frontend; see `Route`."""

    path = "/v1/completions"
    prefix = "cmpl-"
    whole_object = part_object = "text_completion"

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def read(self, fields: Fields, caller: Caller) -> Encode:
        """See `Route`."""
        frontend = self._frontend
        options = read_options(fields, frontend.name)
        fields.refuse_unless(_NEUTRAL)
        max_tokens = fields.integer("max_tokens")
        params = read_params(
            fields,
            frontend.limits,
            max_tokens=_MAX_TOKENS if max_tokens is None else max_tokens,
            spelling=_SPELLING,
            logprobs=fields.integer("logprobs"),
        )
        given = _prompts(fields, frontend.limits.max_n // max(1, options.n))
        fields.done(ignored=LABELS)
        ask = Ask(
            request_id=caller.request_id,
            prompt=[],
            params=params,
            n=options.n,
            protocol="http",
            method=self.path,
            trace=caller.trace,
            spelling=_SPELLING,
        )

        async def encode() -> Call:
            prompts = [
                one if isinstance(one, list) else await frontend.encode(one, field="prompt")
                for one in given
            ]
            asks = one_ask_each(ask, prompts)
            return Call(asks=asks, options=options, choices=_Choices(frontend, options, prompts))

        return encode


def _prompts(fields: Fields, most: int) -> list[str | list[int]]:
    """A text, a list of texts, token ids or a list of those; at most `most` of them."""
    prompt = fields.take("prompt")
    if prompt is None:
        raise fields.wrong("prompt", "is missing")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(map(is_integer, prompt)):
            return [prompt]
        if len(prompt) > max(1, most):
            raise fields.wrong("prompt", f"{len(prompt)} prompts of n sequences are too many")
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if all(isinstance(one, list) and all(map(is_integer, one)) for one in prompt):
            return prompt
    raise fields.wrong("prompt", "must be a text, token ids, or a list of texts or of token ids")


class _Choices:
    """See `Choices`."""

    def __init__(self, frontend: Frontend, options: Options, prompts: list[list[int]]):
        self._tokenizer, self._options, self._prompts = frontend.tokenizer, options, prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}

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
        if self._options.with_ids:
            choice["token_ids"] = delta.tokens
            if is_first:
                choice["prompt_token_ids"] = self._prompts[index // self._options.n]
        return choice

    whole = part
