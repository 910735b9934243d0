"""Fields that completions and chats share: sampling, streaming, and what the answer reports."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from peagle_jax import SamplingParams
from serving.errors import Code, ServiceError, invalid
from serving.http.fields import Biases, Fields, Integers, Texts, neutral
from serving.http.structured import ResponseFormat, StructuredOutputs, guided, read_structured
from serving.limits import Limits
from serving.params import CONTROLS, cache_salt, sampling_params


def _salt(value: str) -> str:
    return cache_salt(value, field="cache_salt")


class StreamOptions(Fields):
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: neutral(False) = None


def _check_priority(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueError("must be between -2147483648 and 2147483647")
    return value


class SharedFields(Fields):
    """Fields of both routes, with OpenAI's defaults."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    return_token_ids: bool = False
    return_rounds: bool = False

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Texts = ()
    stop_token_ids: Integers = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    cache_salt: Annotated[str, AfterValidator(_salt)] | None = None
    priority: Annotated[int, AfterValidator(_check_priority)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Biases = ()
    allowed_token_ids: Integers = None
    bad_words: Texts = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    # A client's own labels are accepted and not used.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    # Fields of OpenAI and vLLM that this server does not support.
    length_penalty: neutral(1) = None
    best_of: neutral(1) = None
    use_beam_search: neutral(False) = None
    spaces_between_special_tokens: neutral(True, False) = None  # has no effect on fast tokenizers
    truncate_prompt_tokens: neutral() = None
    prompt_logprobs: neutral() = None
    return_tokens_as_token_ids: neutral(False) = None
    guided_json: guided("json") = None
    guided_regex: guided("regex") = None
    guided_choice: guided("choice") = None
    guided_grammar: guided("grammar") = None
    store: neutral(False) = None
    service_tier: neutral("auto", "default") = None
    kv_transfer_params: neutral() = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Form of the answer.

    Args:
      n: sequences per prompt.
      is_stream: whether the answer is a stream of server-sent events.
      with_usage: whether a stream ends with its usage.
      with_running_usage: whether every chunk has the usage so far.
      with_ids: whether token ids are reported beside text.
      with_rounds: whether the rounds behind the text are reported, with their drafts.
    """

    n: int
    is_stream: bool
    with_usage: bool
    with_running_usage: bool
    with_ids: bool
    with_rounds: bool


def check_model(content: dict[str, object], model: str) -> None:
    """Refuses a request for another model than `model`, whatever else is wrong with it.

    Raises:
      ServiceError: NOT_FOUND.
    """
    name = content.get("model")
    if isinstance(name, str) and name != model:
        raise ServiceError(
            Code.NOT_FOUND,
            f"model: there is no {name!r} here, this server has {model!r}",
            field="model",
        )


def read_options(fields: SharedFields) -> Options:
    """The form of the answer.

    Raises:
      ServiceError: INVALID_ARGUMENT names a field.
    """
    stream_options = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "is for streams: set stream, or leave it out")
    return Options(
        n=fields.n,
        is_stream=fields.stream,
        with_usage=stream_options.include_usage,
        with_running_usage=stream_options.continuous_usage_stats,
        with_ids=fields.return_token_ids,
        with_rounds=fields.return_rounds,
    )


def read_params(
    fields: SharedFields,
    limits: Limits,
    *,
    max_tokens: int,
    spelling: dict[str, str],
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Sampling parameters.

    Args:
      spelling: the route's names of our parameters, where they differ; gets the name of the constraint.

    Raises:
      ServiceError: INVALID_ARGUMENT names a field.
    """
    structured, spelling["structured"] = read_structured(
        fields.response_format, fields.structured_outputs, spelling
    )
    return sampling_params(
        spelling,
        limits,
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=0 if fields.top_k == -1 else fields.top_k,  # vLLM writes -1 for all tokens
        min_p=fields.min_p,
        seed=fields.seed,
        stop=fields.stop,
        stop_ids=fields.stop_token_ids,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_speculative_tokens=fields.num_speculative_tokens,
        structured=structured,
        **{name: getattr(fields, name) for name in CONTROLS},
    )
