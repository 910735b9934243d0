"""The prefix cache over every interface: hits, salts, tokens and flushes."""

import json
import threading
from collections.abc import Callable

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from serving.protos import open_inference_pb2 as kserve_pb
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.rpc import open_inference
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

PROMPT = list(range(20, 41))
WHOLE = 20  # of its 21 tokens are in whole pages
TOKENS = ("first", "second")


@pytest.fixture(scope="module")
def live(make_engine):
    with LiveServer(make_engine(), http=True, tokens=tuple(map(str.encode, TOKENS))) as server:
        yield server


class Client:
    """A client of every interface, with a bearer token."""

    def __init__(self, server: LiveServer, token: str, channel: grpc.Channel):
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.http = server.client()
        self.http.headers.update(dict(self.metadata))
        self.peagle = peagle_v1_pb2_grpc.GenerationStub(channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def over_peagle(self, salt: str | None = None, prompt=PROMPT) -> int:
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=prompt), stopping=pb.Stopping(max_tokens=2, ignore_eos=True)
        )
        if salt is not None:
            request.cache_salt = salt
        answer = self.peagle.GenerateOnce(request, metadata=self.metadata, timeout=LIMIT)
        return answer.usage.cached_tokens

    def over_vllm(self, salt: str | None = None, prompt=PROMPT, stream=False) -> int:
        request = vllm_pb.GenerateRequest(
            tokenized=vllm_pb.TokenizedInput(input_ids=prompt),
            sampling_params=vllm_pb.SamplingParams(max_tokens=2, ignore_eos=True),
            stream=stream,
        )
        salts = () if salt is None else (("x-cache-salt", salt),)
        metadata = (*self.metadata, *salts)
        *chunks, last = self.vllm.Generate(request, metadata=metadata, timeout=LIMIT)
        assert {one.chunk.cached_tokens for one in chunks} <= {last.complete.cached_tokens}
        assert bool(chunks) == stream
        return last.complete.cached_tokens

    def over_vllm_streamed(self, salt: str | None = None, prompt=PROMPT) -> int:
        return self.over_vllm(salt, prompt, stream=True)

    def over_http(self, salt: str | None = None, prompt=PROMPT) -> int:
        usage = self._post(salt, prompt).json()["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        return usage["prompt_tokens_details"]["cached_tokens"]

    def over_http_streamed(self, salt: str | None = None, prompt=PROMPT) -> int:
        options = dict(stream=True, stream_options={"include_usage": True})
        *_, last, done, _ = self._post(salt, prompt, **options).text.split("\n\n")
        assert done == "data: [DONE]"
        usage = json.loads(last.removeprefix("data: "))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def _post(self, salt: str | None, prompt: list[int], **others) -> httpx.Response:
        body = dict(prompt=prompt, max_tokens=2, ignore_eos=True, cache_salt=salt) | others
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response

    def flush_over_peagle(self) -> int:
        request = pb.FlushCacheRequest()
        return self.peagle.FlushCache(request, metadata=self.metadata, timeout=LIMIT).pages

    def flush_over_vllm(self) -> int:
        request = common_pb2.FlushCacheRequest()
        answer = self.vllm.FlushCache(request, metadata=self.metadata, timeout=LIMIT)
        assert answer.success
        return int(answer.message.split()[0])

    def flush_over_http(self) -> int:
        return self.http.post("/reset_prefix_cache").json()["pages"]


@pytest.fixture
def clients(server):
    """Two callers whose prefixes are forgotten."""
    with grpc.insecure_channel(server.address) as channel:
        made = [Client(server, token, channel) for token in TOKENS]
        for one in made:
            one.flush_over_http()
        yield made
        for one in made:
            one.http.close()


ASKS = {
    "peagle": Client.over_peagle,
    "vllm": Client.over_vllm,
    "vllm, streamed": Client.over_vllm_streamed,
    "http": Client.over_http,
    "http, streamed": Client.over_http_streamed,
}
FLUSHES = [Client.flush_over_peagle, Client.flush_over_vllm, Client.flush_over_http]


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_cached_tokens_are_reported_and_salts_and_tokens_separate(clients, ask: Callable):
    first, second = clients
    assert [ask(first), ask(first)] == [0, WHOLE]
    assert [ask(second), ask(second)] == [0, WHOLE]
    assert [ask(first, "a"), ask(first, "b"), ask(first, "a")] == [0, 0, WHOLE]
    assert ask(second, "a") == 0, "a salt of another caller opens nothing"
    assert ask(first, prompt=[*PROMPT[:9], 5, 6]) == 8


def test_all_interfaces_of_a_caller_share_prefixes(clients):
    first, _ = clients
    found = [[ask(first), ask(first, "salt")] for ask in ASKS.values()]
    assert found == [[0, 0], *[[WHOLE, WHOLE]] * (len(ASKS) - 1)]


def test_a_salt_of_the_kserve_protocol_is_metadata(server, clients):
    first, _ = clients
    request = kserve_pb.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"a long prompt")
    usage = lambda: server.call(lambda: server.frontend.load.prefix_found)
    with grpc.insecure_channel(server.address) as channel:
        service = open_inference.SERVICE
        call = channel.unary_unary(
            f"/{service}/ModelInfer",
            kserve_pb.ModelInferRequest.SerializeToString,
            kserve_pb.ModelInferResponse.FromString,
        )
        found = []
        for salt in ("a", "b", "a"):
            before = usage()
            call(request, metadata=(*first.metadata, ("x-cache-salt", salt)), timeout=LIMIT)
            server.check_empty()
            found.append(usage() - before)
    assert found[:2] == [0, 0]
    assert found[2] > 0


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_flush_forgets_what_the_caller_cached_and_no_more(clients, flush: Callable):
    first, second = clients
    for one in clients:
        assert [one.over_http(), one.over_http("a")] == [0, 0]
    assert flush(first) == 2 * WHOLE // 4
    assert flush(first) == 0
    assert [first.over_http(), first.over_http("a")] == [0, 0]
    assert [second.over_http(), second.over_http("a")] == [WHOLE, WHOLE]


def test_a_page_in_a_browser_cannot_flush(clients):
    first, _ = clients
    first.over_http()
    response = first.http.post("/reset_prefix_cache", headers={"origin": "http://elsewhere"})
    assert response.status_code == 403
    assert first.over_http() == WHOLE


@pytest.mark.parametrize("salt", ["", "x" * 257])
def test_a_salt_has_1_to_256_characters(clients, salt):
    first, _ = clients
    body = dict(prompt=PROMPT, cache_salt=salt)
    response = first.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"
    chat = dict(messages=[{"role": "user", "content": "a"}], cache_salt=salt)
    assert first.http.post("/v1/chat/completions", json=chat).status_code == 400
    for ask, field in ((first.over_peagle, "cache_salt"), (first.over_vllm, "x-cache-salt")):
        with pytest.raises(grpc.RpcError) as refused:
            ask(salt)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{field}: {len(salt)} characters" in refused.value.details()


def test_counters_grow_by_tokens(server, clients):
    first, _ = clients

    def counters() -> list[float]:
        families = text_string_to_metric_families(first.http.get("/metrics").text)
        samples = {one.name: one.value for family in families for one in family.samples}
        names = ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached")
        return [samples[f"vllm:{name}_total"] for name in names]

    before = counters()
    for _ in range(3):
        first.over_http()
    server.check_empty()
    grown = [now - then for now, then in zip(counters(), before, strict=True)]
    assert grown == [3 * len(PROMPT), 2 * WHOLE, 2 * WHOLE]
    stats = first.peagle.GetStats(pb.GetStatsRequest(), metadata=first.metadata, timeout=LIMIT)
    assert [stats.prefix_tokens_queried, stats.prefix_tokens_found] == counters()[:2]
    assert stats.kv_pages_idle >= WHOLE // 4
    assert stats.kv_pages_used == 0


def test_a_flush_of_an_engine_that_dies_or_does_not_serve_is_unavailable(make_engine):
    server = LiveServer(make_engine())
    entered, leave = threading.Event(), threading.Event()

    def die(*_, **options):
        entered.set()
        leave.wait(LIMIT)
        raise RuntimeError("the device is gone")

    server.engine.step = die
    with server.peagle() as stub:
        prompt = pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT))
        running = stub.GenerateOnce.future(prompt, timeout=LIMIT)
        assert entered.wait(LIMIT)
        flush = stub.FlushCache.future(pb.FlushCacheRequest(), timeout=LIMIT)
        eventually(lambda: not server.frontend._worker._mail.empty(), "the flush waits")
        leave.set()
        assert running.code() is grpc.StatusCode.INTERNAL
        late = stub.FlushCache.future(pb.FlushCacheRequest(), timeout=LIMIT)
        assert [flush.code(), late.code()] == [grpc.StatusCode.UNAVAILABLE] * 2
    server.close()
