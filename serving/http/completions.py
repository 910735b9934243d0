"""`/v1/completions`: OpenAI's route for plain text, one or several prompts."""

from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import FailFast, Field

from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import Tokenizer
from serving.errors import invalid
from serving.frontend import Frontend
from serving.http.errors import OPENAI
from serving.http.fields import described, refused
from serving.http.openai_answer import ChoiceReports, OpenAiAnswer, TextField
from serving.http.options import Options, SharedFields, read_options, read_params
from serving.http.reports import CompletionLogprobs, prompt_logprobs
from serving.http.route import Call, Caller, Encode, Route, one_ask_each
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
    echo: bool = False
    prompt_logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: refused("send text or token ids") = None
    add_special_tokens: refused("send token ids", True) = None


class Completions(Route[CompletionFields]):
    """Plain text, or several, as OpenAI's API has it."""

    path = "/v1/completions"
    dialect = OPENAI
    fields = CompletionFields

    def _prepare(self, fields: CompletionFields, caller: Caller) -> Encode:
        frontend = self._frontend
        options = read_options(fields)
        if options.is_stream and fields.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not for streams; leave stream out, or use echo")
        echo = _Echo.of(fields)
        spelling = dict(_SPELLING)
        if fields.prompt_logprobs is None:
            spelling["prompt_logprobs"] = "echo"
        params = read_params(
            fields,
            frontend.limits,
            max_tokens=1 if echo.drops_output else fields.max_tokens,
            spelling=spelling,
            logprobs=fields.logprobs,
            prompt_logprobs=echo.num_scores,
        )
        unencoded = _prompts(fields.prompt, options.n, frontend.limits.max_n)
        if fields.suffix:
            unencoded = _with_suffix(unencoded, fields, frontend.tokenizer)
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
            pairs = zip(unencoded, prompts, strict=True)
            echoed = [_text(frontend.tokenizer, *pair) for pair in pairs] if echo.is_on else []
            answer = OpenAiAnswer(
                f"cmpl-{caller.request_id}",
                frontend.name,
                objects=("text_completion", "text_completion"),
                options=options,
                choices=_Choices(frontend, ask.params, options, echo, prompts, echoed),
                num_prompt=sum(map(len, prompts)),
            )
            return Call(asks=asks, answer=answer)

        return encode


def _prompts(prompt: str | list, n: int, most: int) -> list[str | list[int]]:
    """The prompts of a request, with at most `most` sequences if there are several."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    num_prompts = len(prompt)
    if num_prompts > 1 and num_prompts * max(1, n) > most:
        times = "" if n <= 1 else f" with n={n}"
        rule = (
            f"{num_prompts} prompts{times} are more than the {most} sequences that a request may "
            "have (--max-n)"
        )
        raise invalid("prompt", rule)
    return prompt


_FILL_IN_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
"""Tokens before the text, between it and what follows, and after that, where the model fills in the
middle.
"""


def _with_suffix(
    prompts: list[str | list[int]], fields: CompletionFields, tokenizer: Tokenizer | None
) -> list[str]:
    """The prompts of a model that fills in what stands between each of them and the suffix."""
    added = {} if tokenizer is None else tokenizer.added
    marks = next((one for one in _FILL_IN_MIDDLE if added.keys() >= {*one}), None)
    if marks is None:
        raise invalid("suffix", "this model has no tokens to fill in the middle; leave it out")
    if fields.echo:
        raise invalid("echo", "is not for texts with a suffix; leave one of the two out")
    if not all(isinstance(one, str) for one in prompts):
        raise invalid("suffix", "needs a prompt that is text")
    before, between, after = marks
    return [f"{before}{one}{between}{fields.suffix}{after}" for one in prompts]


@dataclass(frozen=True)
class _Echo:
    """Parts of the prompt that an answer repeats: text, logprobs, or both.

    Attributes:
      is_on: whether text and logprobs begin with the prompt's.
      num_top: alternatives in the logprobs of echoed tokens; None without logprobs.
      num_prompt_top: alternatives in `prompt_logprobs`; None without them.
      drops_output: whether the answer is the prompt alone (max_tokens 0). The engine generates one
        token, because nothing ends a request before its first token.
    """

    is_on: bool
    num_top: int | None
    num_prompt_top: int | None
    drops_output: bool

    @classmethod
    def of(cls, fields: CompletionFields) -> Self:
        num_top = fields.logprobs if fields.echo else None
        drops_output = fields.echo and fields.max_tokens == 0
        return cls(fields.echo, num_top, fields.prompt_logprobs, drops_output)

    @property
    def num_scores(self) -> int | None:
        """Alternatives to ask the engine for; None: no scores."""
        return max((n for n in (self.num_top, self.num_prompt_top) if n is not None), default=None)


def _text(tokenizer: Tokenizer | None, given: str | list[int], prompt: list[int]) -> str:
    """The text of a prompt."""
    if isinstance(given, str):
        return given
    return "" if tokenizer is None else tokenizer.decode(prompt)


class _Choices:
    """The choices of completions; `echoed` are the texts of the prompts, with an echo."""

    def __init__(
        self,
        frontend: Frontend,
        params: SamplingParams,
        options: Options,
        echo: _Echo,
        prompts: list[list[int]],
        echoed: list[str],
    ):
        self._tokenizer, self._options, self._prompts = frontend.tokenizer, options, prompts
        self._shown = frontend.replies.shown(params)
        self._echo, self._echoed = echo, echoed
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._reports = ChoiceReports(options, frontend.tokenizer)

    def part(self, index: int, delta: Delta) -> dict:
        is_first, place = index not in self._logprobs, index // self._options.n
        if is_first:
            self._logprobs[index] = CompletionLogprobs(self._tokenizer, self._shown)
        if self._echo.drops_output:
            delta = replace(delta, tokens=[], text="", logprobs=delta.logprobs and [])
        text, finish = delta.text, delta.finish
        if is_first and self._echo.is_on:
            text = self._echoed[place] + text
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._scores(index, delta),
            "finish_reason": finish and finish.reason,
            "stop_reason": finish and finish.stop_reason,
        }
        if delta.prompt_logprobs is not None and self._echo.num_prompt_top is not None:
            given = (self._prompts[place], delta.prompt_logprobs, self._echo.num_prompt_top)
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, *given)
        return choice | self._reports.of(index, delta, self._prompts[place] if is_first else None)

    def only_text(self, index: int, delta: Delta) -> TextField | None:
        has_more = delta.finish or delta.logprobs is not None or delta.prompt_logprobs is not None
        is_plain = index in self._logprobs and not has_more and not self._echo.drops_output
        return "text" if is_plain else None

    def _scores(self, index: int, delta: Delta) -> dict | None:
        """`logprobs` of a choice, with those of an echoed prompt first."""
        tokens, scores = list(delta.tokens), list(delta.logprobs or [])
        if delta.prompt_logprobs is not None and self._echo.num_top is not None:
            tokens = self._prompts[index // self._options.n] + tokens
            scores = delta.prompt_logprobs + scores
        elif delta.logprobs is None:
            return None
        # The engine may have scored the prompt with more alternatives, for `prompt_logprobs`.
        return self._logprobs[index].of(tokens, scores, self._echo.num_top)

    whole = part
