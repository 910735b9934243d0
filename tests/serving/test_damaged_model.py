"""A request whose logits are not finite, as its client, its neighbours and an operator see it."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import jax.numpy as jnp
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from peagle_jax import Engine
from peagle_jax.engine.host.request import NOT_FINITE
from serving.protos import peagle_v1_pb2, peagle_v1_pb2_grpc
from tests import tiny
from tests.programs import OneBucketConfig
from tests.serving.conftest import EOS_IDS, SIZES
from tests.serving.live import LiveServer
from tests.serving.test_metrics import moved, scrape

GOOD, BAD = [5, 9, 13], 40  # BAD: the token whose embedding is NaN


@pytest.fixture(scope="module")
def live(tokenizer):
    target = tiny.target(**tiny.ONE_LAYER, eos_ids=EOS_IDS)
    rows = target.embed.weight[...]
    target.embed.weight.set_value(rows.at[BAD].set(jnp.nan))
    head = tiny.head(**tiny.HEAD_OF_ONE_LAYER)
    engine = Engine(target, head, OneBucketConfig(**SIZES), tokenizer=tokenizer)
    with LiveServer(engine, http=True) as server:
        yield server


def post(server, prompt, **fields) -> httpx.Response:
    body = dict(prompt=prompt, temperature=0, max_tokens=6, ignore_eos=True) | fields
    return server.post("/v1/completions", **body)


def peagle(server, prompt):
    with grpc.insecure_channel(server.address) as channel:
        tokens = peagle_v1_pb2.TokenIds(ids=prompt)
        request = peagle_v1_pb2.GenerateRequest(tokens=tokens)
        list(peagle_v1_pb2_grpc.GenerationStub(channel).Generate(request))


def vllm(server, prompt):
    with grpc.insecure_channel(server.address) as channel:
        tokenized = vllm_engine_pb2.TokenizedInput(input_ids=prompt)
        request = vllm_engine_pb2.GenerateRequest(tokenized=tokenized)
        list(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request))


def test_http_answers_500_with_a_sentence_and_counts(server):
    before = scrape(server)
    answer = post(server, [7, BAD])
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["message"], error["type"]) == (NOT_FINITE, "server_error")
    assert error["code"] == "internal"
    changes = moved(server, before)
    assert changes["peagle:requests_not_finite_total"] == 1
    assert changes["peagle:requests_total{INTERNAL,http}"] == 1
    assert changes["vllm:request_success_total{error}"] == 1
    assert "vllm:time_to_first_token_seconds_count" not in changes


@pytest.mark.parametrize("call", [peagle, vllm])
def test_grpc_ends_with_internal_and_the_sentence(server, call):
    before = scrape(server)
    with pytest.raises(grpc.RpcError) as caught:
        call(server, [7, BAD])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == NOT_FINITE
    assert moved(server, before)["peagle:requests_not_finite_total"] == 1


def test_neighbours_get_what_they_get_alone(server):
    want = post(server, GOOD, max_tokens=40).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(post, server, GOOD, max_tokens=40) for _ in range(4)]
        bad = [pool.submit(post, server, [BAD, *GOOD]) for _ in range(4)]
    assert [one.result().json()["choices"] for one in good] == [want] * 4
    assert {one.result().status_code for one in bad} == {500}
