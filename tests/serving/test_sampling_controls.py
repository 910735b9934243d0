"""Sampling controls on every API: each field reaches the engine's parameters as it was sent."""

import json
from types import SimpleNamespace

import pytest

from peagle_jax import EngineConfig, SamplingParams
from peagle_jax.options import options_of
from peagle_jax.text.prompts import read_jsonl
from serving.errors import ServiceError
from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
from serving.http.fields import Reading
from serving.http.options import read_params
from serving.limits import Limits
from serving.protos import peagle_v1_pb2, vllm_engine_pb2
from serving.rpc import json_params
from serving.rpc.peagle import Generation
from serving.rpc.vllm import VllmEngine
from serving.sampling_messages import GENERATE

FRONTEND = SimpleNamespace(limits=Limits(), config=EngineConfig(), tokenizer=None)
FIELDS = dict(logit_bias={5: -3.5, 9: 100.0}, allowed_token_ids=(7, 5, 9), min_tokens=7, seed=11)
FIELDS |= dict(bad_words=("no", " never"), ignore_eos=True, stop_ids=(5, 6), stop=("a", "b"))
FIELDS |= dict(repetition_penalty=1.25, frequency_penalty=-0.5, presence_penalty=2.0, top_k=3)
FIELDS |= dict(temperature=0.75, top_p=0.5, min_p=0.25, logprobs=2, prompt_logprobs=1)
FIELDS |= dict(include_stop_str_in_output=True, skip_special_tokens=False, max_tokens=98)
FIELDS |= dict(num_speculative_tokens=2, logprobs_mode="sampled")


def as_json(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {str(token): bias for token, bias in value.items()}
    return list(value) if isinstance(value, tuple) else value


def vllms(name: str, value: object) -> object:
    """The value as vLLM's routes spell it."""
    return "processed_logprobs" if name == "logprobs_mode" else as_json(name, value)


def json_name(name: str) -> str:
    return {"stop_ids": "stop_token_ids"}.get(name, name)


def over_http(kind: type, **others):
    def read(name: str, value: object) -> SamplingParams:
        content = others | {json_name(name): vllms(name, value)}
        fields = kind.read(content, Reading(Limits()))
        return read_params(fields, Limits(), max_tokens=99, spelling={}, logprobs=None)

    return read


def over_peagle(name: str, value: object) -> SamplingParams:
    request = peagle_v1_pb2.GenerateRequest(text="a")
    GENERATE.write(request, {name: value})
    return Generation(FRONTEND)._params(request)


def over_vllm(name: str, value: object) -> SamplingParams:
    params = vllm_engine_pb2.SamplingParams(**{json_name(name): value})
    request = vllm_engine_pb2.GenerateRequest(sampling_params=params)
    return VllmEngine(FRONTEND)._params(request, None)


def over_open_inference(name: str, value: object) -> SamplingParams:
    text = json.dumps({json_name(name): as_json(name, value)}).encode()
    return json_params.read_sampling(text, Limits(), max_tokens=99).params


APIS = {
    "completions": over_http(CompletionFields, prompt="a"),
    "chats": over_http(ChatFields, messages=[{"role": "user", "content": "a"}]),
    "peagle.v1": over_peagle,
    "VllmEngine": over_vllm,
    "Open Inference": over_open_inference,
}
ROUTES = ("max_tokens", "logprobs", "prompt_logprobs")
"""Each route of HTTP has these in its own form."""
ABSENT = {
    "VllmEngine": (
        *("allowed_token_ids", "bad_words", "num_speculative_tokens", "logprobs_mode"),
        *("include_stop_str_in_output", "skip_special_tokens"),
    ),
    "Open Inference": ("logprobs", "logprobs_mode", "prompt_logprobs"),
    "peagle.v1": ("include_stop_str_in_output", "skip_special_tokens"),
    "completions": ROUTES,
    "chats": ROUTES,
}
"""Options that a protocol does not have, or that its client applies."""


def test_every_option_is_tried():
    assert options_of(SamplingParams).keys() == FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("api", APIS)
def test_a_field_reaches_the_parameters(api, name):
    value = FIELDS[name]
    if name in ABSENT[api]:
        return
    got = getattr(APIS[api](name, value), name)
    want = getattr(SamplingParams(**{name: value}), name)
    assert got == want
    assert got != getattr(SamplingParams(), name)


@pytest.mark.parametrize("api", APIS)
def test_the_smallest_penalty_is_accepted_as_float32_too(api):
    """Fields of gRPC are float32, whose 0.01 is below the number itself."""
    got = APIS[api]("repetition_penalty", 0.01).repetition_penalty
    assert got == pytest.approx(0.01)


@pytest.mark.parametrize("api", APIS)
def test_no_field_means_no_control(api):
    params = APIS[api]("ignore_eos", False)
    assert not params.is_adjusted
    assert params.allowed_token_ids is None


def test_prompt_files_take_the_fields(tmp_path):
    file = tmp_path / "prompts.jsonl"
    row = {"prompt": "a"} | {name: as_json(name, value) for name, value in FIELDS.items()}
    file.write_text(json.dumps(row))
    (prompt,) = read_jsonl(file)
    assert prompt.params(SamplingParams()) == SamplingParams(**FIELDS)


WRONG = {
    "logit_bias": [{5: 101.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [tuple(range(1025))],
    "bad_words": [(" ",), ("x" * 513,), ("x",) * 129],
    "min_tokens": [2**31 - 1],
    "repetition_penalty": [-1.0, 1e-39, 0.0099, 101.0],
    "frequency_penalty": [2.5],
    "presence_penalty": [-2.5],
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("api", APIS)
def test_a_value_out_of_range_is_refused_in_a_short_message_that_names_the_field(api, name):
    for value in WRONG[name] if name not in ABSENT[api] else ():
        with pytest.raises(ServiceError) as caught:
            APIS[api](name, value)
        assert caught.value.field.endswith(name)
        assert len(str(caught.value)) < 300
