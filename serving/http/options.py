"""What completions and chats have in common: options of sampling, of streams, of what is reported."""

from dataclasses import dataclass

import grpc

from peagle_jax import SamplingParams
from serving.errors import ServiceError
from serving.http.fields import Fields
from serving.limits import Limits
from serving.params import sampling_params

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""A client's own notes about a request: accepted, and nothing is done with them."""

_NEUTRAL = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # about slow tokenizers: ours are fast ones
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "kv_transfer_params": (),
}
"""Fields of OpenAI and vLLM that this server does not do, with the values that ask for nothing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a request is to be answered.

    Args:
      n: sequences for each prompt.
      is_stream: by server-sent events.
      with_usage: whether a stream ends with its usage.
      with_running_usage: whether every chunk has the usage so far.
      with_ids: whether token ids are reported beside text.
    """

    n: int
    is_stream: bool
    with_usage: bool
    with_running_usage: bool
    with_ids: bool


def read_options(fields: Fields, model: str) -> Options:
    """Everything but sampling and prompt.

    Raises:
      ServiceError: INVALID_ARGUMENT names a field; NOT_FOUND for another model than `model`.
    """
    name = fields.text("model")
    if name not in (None, model):
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            f"model: there is no {name!r} here, this server has {model!r}",
            field="model",
        )
    fields.refuse_unless(_NEUTRAL)
    is_stream = fields.flag("stream")
    with_usage = with_running_usage = False
    if (stream_options := fields.inner("stream_options")) is not None:
        if not is_stream:
            raise fields.wrong("stream_options", "is for streams: set stream, or leave it out")
        with_usage = stream_options.flag("include_usage")
        with_running_usage = stream_options.flag("continuous_usage_stats")
        stream_options.refuse_unless({"include_obfuscation": (False,)})
        stream_options.done()
    return Options(
        n=_or(fields.integer("n"), 1),
        is_stream=is_stream,
        with_usage=with_usage,
        with_running_usage=with_running_usage,
        with_ids=fields.flag("return_token_ids"),
    )


def read_params(
    fields: Fields,
    limits: Limits,
    *,
    max_tokens: int,
    spelling: dict[str, str],
    logprobs: int | None,
) -> SamplingParams:
    """How to sample, with OpenAI's defaults.

    Args:
      spelling: the route's names of our parameters, where they differ.
    Raises:
      ServiceError: INVALID_ARGUMENT names a field.
    """
    top_k = _or(fields.integer("top_k"), 0)
    return sampling_params(
        spelling,
        limits,
        max_tokens=max_tokens,
        temperature=_or(fields.number("temperature"), 1.0),
        top_p=_or(fields.number("top_p"), 1.0),
        top_k=0 if top_k == -1 else top_k,  # vLLM's way to say all
        min_p=_or(fields.number("min_p"), 0.0),
        seed=fields.integer("seed"),
        stop=fields.texts("stop"),
        stop_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        num_speculative_tokens=fields.integer("num_speculative_tokens"),
    )


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value
