"""Fields that completions and chats share: sampling, streaming, and what the answer reports."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, create_model

from peagle_jax.options import Option, options_of
from peagle_jax.sampling_params import SamplingParams
from serving.errors import invalid
from serving.http.errors import no_such_model
from serving.http.fields import (
    Biases,
    Fields,
    Integers,
    Texts,
    described,
    ignored,
    refused,
)
from serving.http.structured import ResponseFormat, StructuredOutputs, read_structured
from serving.limits import Limits
from serving.params import cache_salt, sampling_params, spelled

LABEL = "a client's own label"
CACHE = "the prefix cache keeps what it has room for"
NOT_STORED = "nothing is stored"
ONE_TIER = "there is one tier"
_NO_BEAMS = "there is no beam search"
_NO_PROGRAMS = "there are no processors of logits but the fields listed as honoured"
_NO_FILTER = "filters are top_k, top_p and min_p"
_STRUCTURED = 'send structured_outputs with "{}"'


_OF_ROUTES = ("max_tokens", "logprobs", "logprobs_mode", "prompt_logprobs")
"""Options of `SamplingParams` that each route has in its own form."""
_MODES = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}
"""vLLM's names of `SamplingParams.logprobs_mode`."""


def _salt(value: str) -> str:
    return cache_salt(value, field="cache_salt")


class StreamOptions(Fields):
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: ignored("events are not padded", False) = None


def _check_priority(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise ValueError("must be between -2147483648 and 2147483647")
    return value


_TYPES = {
    **{"int": int, "float": float, "bool": bool},
    **{"texts": Texts, "ints": Integers, "biases": Biases},
}
_SHARED = [name for name in options_of(SamplingParams) if name not in _OF_ROUTES]
_DEFAULTS = {"temperature": 1.0}
"""OpenAI's defaults, where they differ from those of `SamplingParams`."""


def _sampling_field(one: Option) -> tuple[object, object]:
    """Type and default."""
    is_number_or_left_out = one.default is None and one.kind == "int"
    type_ = int | None if is_number_or_left_out else _TYPES[one.kind]
    return type_, _DEFAULTS.get(one.name, one.default)


SamplingFields: type[Fields] = create_model(
    "SamplingFields",
    __base__=Fields,
    **{spelled(name): _sampling_field(options_of(SamplingParams)[name]) for name in _SHARED},
)
"""Fields of `SamplingParams` that both routes have."""


class SharedFields(SamplingFields):
    """Fields of both routes."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    return_token_ids: bool = False
    return_rounds: bool = False

    logprobs_mode: Annotated[
        Literal[tuple(_MODES)],
        described("must be raw_logprobs or processed_logprobs: logits are not reported"),
    ] = "raw_logprobs"

    cache_salt: Annotated[str, AfterValidator(_salt)] | None = None
    priority: Annotated[int, AfterValidator(_check_priority)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    user: ignored(LABEL) = None
    metadata: ignored(LABEL) = None
    safety_identifier: ignored(LABEL) = None
    prompt_cache_key: ignored(CACHE) = None
    prompt_cache_retention: ignored(CACHE) = None
    prompt_cache_options: ignored(CACHE) = None
    store: ignored(NOT_STORED, False) = None
    service_tier: ignored(ONE_TIER, "auto", "default") = None
    spaces_between_special_tokens: ignored("fast tokenizers have no such option") = None
    mm_processor_kwargs: ignored("there are texts only", {}) = None
    media_io_kwargs: ignored("there are texts only", {}) = None

    best_of: refused("send n", 1) = None
    length_penalty: refused(_NO_BEAMS, 1) = None
    use_beam_search: refused(_NO_BEAMS, False) = None
    truncate_prompt_tokens: refused("send the part of the prompt that is to be read") = None
    prompt_logprobs: refused("/v1/completions has them") = None
    return_tokens_as_token_ids: refused("send return_token_ids", False) = None
    kv_transfer_params: refused("prefill and decoding are in one place", {}) = None
    logits_processors: refused(_NO_PROGRAMS, []) = None
    custom_logit_processor: refused(_NO_PROGRAMS) = None
    vllm_xargs: refused(_NO_PROGRAMS, {}) = None
    thinking_token_budget: refused("reasoning has no limit of its own") = None
    repetition_detection: refused("send repetition_penalty or stop") = None
    moderation: refused("texts are not judged") = None
    # Of vLLM before structured_outputs, SGLang, llama.cpp, TGI and gateways.
    guided_json: refused(_STRUCTURED.format("json")) = None
    guided_regex: refused(_STRUCTURED.format("regex")) = None
    guided_choice: refused(_STRUCTURED.format("choice")) = None
    guided_grammar: refused(_STRUCTURED.format("grammar")) = None
    json_schema: refused(_STRUCTURED.format("json")) = None
    regex: refused(_STRUCTURED.format("regex")) = None
    grammar: refused(_STRUCTURED.format("grammar")) = None
    ebnf: refused(_STRUCTURED.format("grammar")) = None
    stop_regex: refused("send stop") = None
    no_stop_trim: refused("texts end before a stop string", False) = None
    min_new_tokens: refused("send min_tokens") = None
    max_new_tokens: refused("send max_tokens") = None
    n_predict: refused("send max_tokens") = None
    repeat_penalty: refused("send repetition_penalty", 1) = None
    typical_p: refused(_NO_FILTER, 1) = None
    tfs_z: refused(_NO_FILTER, 1) = None
    top_a: refused(_NO_FILTER, 0) = None
    mirostat: refused(_NO_FILTER, 0) = None
    dynatemp_range: refused(_NO_FILTER, 0) = None
    xtc_probability: refused(_NO_FILTER, 0) = None
    dry_multiplier: refused(_NO_FILTER, 0) = None
    lora_path: refused("there is one model") = None


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
        raise no_such_model(name, model)


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
      spelling: the route's names of our parameters, where they differ; gets the name of the
        constraint.

    Raises:
      ServiceError: INVALID_ARGUMENT names a field.
    """
    structured, spelling["structured"] = read_structured(
        fields.response_format, fields.structured_outputs
    )
    values = {name: getattr(fields, spelled(name)) for name in _SHARED}
    for name, none in (("top_k", 0), ("seed", None)):
        values[name] = none if values[name] == -1 else values[name]  # as vLLM writes it
    return sampling_params(
        spelling,
        limits,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logprobs_mode=_MODES[fields.logprobs_mode],
        prompt_logprobs=prompt_logprobs,
        structured=structured,
        **values,
    )
