"""Spans of requests: children of the client's, with the numbers of the request."""

import threading
import time

import grpc
import httpx
import pytest

from peagle_jax import extras
from peagle_jax.config import ConfigError
from serving import tracing
from serving.limits import Limits
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.tracing import Tracer
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
LONG = dict(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def exporter():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def live(make_engine, exporter):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider, "tiny")
    with LiveServer(make_engine(), http=True, report=tracer.report) as server:
        yield server
    tracer.close()


@pytest.fixture
def spans(server, exporter):
    """The spans of what has ended since the test began."""
    exporter.clear()

    def take():
        server.check_empty()
        return exporter.get_finished_spans()

    return take


def post(server, path: str, body: dict, **options) -> httpx.Response:
    return httpx.post(f"http://{server.http_address}{path}", json=body, timeout=LIMIT, **options)


def test_a_span_is_the_child_of_the_clients(server, spans):
    body = dict(prompt="hello", max_tokens=20, temperature=0.5, top_p=0.9, seed=3, ignore_eos=True)
    before = time.time_ns()
    response = post(server, "/v1/completions", body, headers=HEADERS | {"x-request-id": "mine"})
    (span,) = spans()
    after = time.time_ns()
    assert span.name == "text_completion tiny"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"
    assert span.status.is_ok
    assert before <= span.start_time < span.end_time <= after
    found = span.attributes
    usage = response.json()["usage"]
    request = dict(id="mine", max_tokens=20, temperature=0.5, top_p=0.9, n=1)
    expected = {f"gen_ai.request.{name}": value for name, value in request.items()}
    expected |= {"gen_ai.response.model": "tiny", "gen_ai.operation.name": "text_completion"}
    expected |= {"gen_ai.response.finish_reasons": ("length",), "peagle.status": "OK"}
    expected |= {"gen_ai.usage.prompt_tokens": usage["prompt_tokens"], "peagle.protocol": "http"}
    expected["gen_ai.usage.completion_tokens"] = 20
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    expected["peagle.accepted_tokens"] = accepted
    assert found.items() >= expected.items()
    prefix = "gen_ai.latency."
    latency = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
    assert latency["e2e"] == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-6)
    parts = [latency[f"time_in_model_{part}"] for part in ("prefill", "decode")]
    assert latency["time_in_model_inference"] == pytest.approx(sum(parts))
    assert 0 < latency["time_to_first_token"] < latency["e2e"]
    assert latency["time_in_queue"] + latency["time_in_model_inference"] <= latency["e2e"]
    (first,) = span.events
    assert span.start_time < first.timestamp < span.end_time


def test_calls_of_grpc_have_spans_too(server, spans):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])
    request = pb.GenerateRequest(chat=chat, stopping=pb.Stopping(max_tokens=5))
    with server.peagle() as stub:
        stub.GenerateOnce(request, metadata=list(HEADERS.items()))
    (span,) = spans()
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.name == "chat tiny"
    assert span.attributes["peagle.method"] == "peagle.v1.Generation/GenerateOnce"


def test_errors_are_recorded_in_the_span(server, spans, monkeypatch, pace):
    monkeypatch.setattr(server.frontend.admission, "limits", Limits(max_request_seconds=0.5))

    ended: list = []

    def expire() -> list:
        """Spans of requests that ended at their limit; one that came too late has none."""
        assert post(server, "/v1/completions", dict(prompt="a") | LONG).status_code == 504
        server.check_freed(pace)
        ended.extend(spans())
        return ended

    eventually(expire, "a request that came to the engine in time has a span")
    (span,) = ended
    assert not span.status.is_ok
    assert "time was up" in span.status.description
    assert span.attributes["error.type"] == "DEADLINE_EXCEEDED"


def test_a_client_that_leaves_is_no_error(server, spans, pace):
    request = pb.GenerateRequest(text="a", stopping=pb.Stopping(**LONG))
    with grpc.insecure_channel(server.address) as channel:
        call = peagle_v1_pb2_grpc.GenerationStub(channel).Generate(request)
        pace.release(2)
        next(call)
        call.cancel()
        server.check_freed(pace)
        (span,) = spans()
    assert span.attributes["peagle.status"] == "CANCELLED"
    assert span.attributes["gen_ai.usage.completion_tokens"] > 0
    assert span.status.status_code.name == "UNSET"


def test_closing_does_not_wait_for_a_collector_that_is_not_there(monkeypatch):
    from opentelemetry.sdk.trace import TracerProvider

    provider, held = TracerProvider(shutdown_on_exit=False), threading.Event()
    monkeypatch.setattr(provider, "shutdown", held.wait)
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.1)
    Tracer(provider, "tiny").close()
    held.set()


def test_without_opentelemetry_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setattr(extras, "is_installed", lambda name: "opentelemetry" not in name)
    with pytest.raises(ConfigError, match=r"pip install 'peagle-jax\[tracing\]'"):
        Tracer.to("http://localhost:4317", "tiny")
