"""Large requests: refused unparsed, parsed in a thread, freed before the answer."""

import asyncio
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import grpc
import httpx
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from serving import json_input
from serving.errors import Code, ServiceError
from serving.http import generation
from serving.http.body import Body, BodyMemory
from serving.http.completions import Completions
from serving.limits import Limits
from serving.protos import open_inference_pb2, vllm_engine_pb2
from serving.protos import peagle_v1_pb2 as pb
from serving.rpc import open_inference, vllm
from serving.rpc.wire import WireLimits, find_excess
from tests.serving import wire
from tests.serving.live import LiveServer
from tests.serving.test_fuzz import METHODS, send_one
from tests.serving.test_http_errors import refusal
from tests.waiting import LIMIT as SECONDS
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("server")  # every test leaves it empty

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"role": "user", "content": "a"}


UNPARSED = {
    "300,000 empty messages": (CHAT, b'{"messages":[' + b"{}," * 300_000 + b"{}]}"),
    "2 million stop ids": (COMPLETIONS, b'{"stop_token_ids":[' + b"5," * 2_000_000 + b"5]}"),
    "a million lists": (COMPLETIONS, b'{"prompt":' + b"[" * 1_000_000),
}


@pytest.mark.parametrize("name", UNPARSED)
def test_too_many_values_are_refused_before_parsing(server, http, monkeypatch, name):
    path, content = UNPARSED[name]
    parser = SimpleNamespace(loads=lambda *given, **named: pytest.fail("parsed"))
    monkeypatch.setattr(json_input, "json", parser)
    headers = {"content-type": "application/json"}
    error = refusal(http.post(path, content=content, headers=headers))
    assert error["param"] == "body"
    assert "are more than" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_duplicate_key_is_refused(server, http, path):
    content = b'{"prompt": "a", "temperature": 0, "temperature": 1}'
    headers = {"content-type": "application/json"}
    assert "'temperature'" in refusal(http.post(path, content=content, headers=headers))["message"]


def test_errors_quote_only_the_beginning_of_a_value(server, http):
    unknown = {"structured_outputs": {"x" * 90_000: 1}}
    for content in (unknown, {"model": "x" * 90_000}, {"chat_template": "x" * 90_000}):
        answer = http.post(CHAT, json={"messages": [HELLO]} | content)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000


def test_large_bodies_are_parsed_in_a_thread(server, http, monkeypatch):
    """Meanwhile probes, small requests and other connections are answered."""
    healthy, is_held, released, names = Completions.read, threading.Event(), threading.Event(), []

    def held(self, content, caller):
        names.append(threading.current_thread().name)
        if "user" in content:
            is_held.set()
            assert released.wait(SECONDS)
        return healthy(self, content, caller)

    monkeypatch.setattr(Completions, "read", held)
    small = {"prompt": "a", "max_tokens": 2}
    answers = []
    large = threading.Thread(
        target=lambda: answers.append(http.post(COMPLETIONS, json=small | {"user": "x" * 9000}))
    )
    large.start()
    assert is_held.wait(SECONDS)
    url = f"http://{server.http_address}"
    assert [httpx.get(f"{url}/health").status_code for _ in range(5)] == [200] * 5
    assert httpx.post(url + COMPLETIONS, json=small, timeout=SECONDS).status_code == 200
    assert not answers
    released.set()
    large.join(SECONDS)
    assert answers[0].status_code == 200
    assert names[0].startswith("json")
    assert not names[1].startswith("json")


def test_a_body_is_freed_before_its_answer_is_generated(server, http, monkeypatch):
    bodies = []
    make = generation.Reader.body

    def kept(self):
        bodies.append(make(self))
        return bodies[-1]

    monkeypatch.setattr(generation.Reader, "body", kept)
    with server.paced():
        content = {"prompt": "a", "max_tokens": 9, "stream": True, "user": "x" * 500_000}
        asking = threading.Thread(target=lambda: http.post(COMPLETIONS, json=content))
        asking.start()
        eventually(lambda: server.frontend.num_open == 1)
        assert [one.content for one in bodies] == [b""]
        assert bodies[0]._memory.num_bytes == 0
    asking.join(SECONDS)


async def receive_all(body: Body, pieces: list[bytes]) -> None:
    messages = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
    messages[-1]["more_body"] = False

    async def receive():
        return messages.pop(0)

    await body.read(Headers({"content-type": "application/json"}), receive, 1 << 20)


def test_bodies_share_a_bounded_memory():
    async def share():
        memory = BodyMemory(600_000)
        first, second, small = Body(memory), Body(memory), Body(memory)
        await receive_all(first, [b"x" * 100_000] * 4)
        assert memory.num_bytes == 400_000
        with pytest.raises(ServiceError) as refused:
            await receive_all(second, [b"x" * 100_000] * 3)
        assert refused.value.code is Code.RESOURCE_EXHAUSTED
        assert refused.value.retry_after
        second.free()
        await receive_all(small, [b"x" * 60_000])
        first.free()
        first.free()
        assert memory.num_bytes == 0
        await receive_all(second, [b"x" * 100_000] * 3)
        assert (len(second.content), memory.num_bytes) == (300_000, 300_000)

    asyncio.run(share())


PEAGLE, KSERVE = "peagle.v1.Generation/Generate", f"{open_inference.SERVICE}/ModelInfer"
INFER = open_inference_pb2.ModelInferRequest


def of_chat(messages: int, **others) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * messages, **others))


FULL = {
    "messages": (PEAGLE, of_chat(400_000)),
    "outputs": (KSERVE, INFER(outputs=[INFER.InferRequestedOutputTensor()] * 100_000)),
    "ids to abort": ("peagle.v1.Generation/Abort", pb.AbortRequest(request_ids=[""] * 20_000)),
}


@pytest.mark.parametrize("name", FULL)
def test_messages_of_many_fields_are_refused_before_parsing(server, name):
    path, request = FULL[name]
    error = send_one(server, path, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "fields" in error.details()


def infer(parameters: bytes) -> INFER:
    request = INFER(model_name="tiny")
    for name, text in (("text_input", b"a"), ("sampling_parameters", parameters)):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text)
    return request


OUTPUTS = [INFER.InferRequestedOutputTensor(name="text_output")] * 17
NAMED = {
    "chat.messages": (PEAGLE, of_chat(2049)),
    "outputs: 17": (KSERVE, INFER(model_name="tiny", outputs=OUTPUTS)),
    "chat.variables_json: 70002 bytes are more than 65536": (
        PEAGLE,
        of_chat(1, variables_json="[" * 70_002),
    ),
    "sampling_parameters: 70000 bytes are more than 65536": (KSERVE, infer(b"[" * 70_000)),
    "chat.variables_json: the key 'a' stands": (
        PEAGLE,
        of_chat(1, variables_json='{"a": 1, "a": 2}'),
    ),
}


@pytest.mark.parametrize("words", NAMED)
def test_long_lists_are_named(server, words):
    path, request = NAMED[words]
    error = send_one(server, path, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()


def test_a_duplicate_key_of_sampling_parameters_is_refused(server):
    error = send_one(server, KSERVE, infer(b'{"n": 1, "n": 2}'))
    assert "sampling_parameters: the key 'n' stands in an object twice" in error.details()


SMALL = [path for path in METHODS if not path.endswith(("Generate", "GenerateOnce", "Infer"))]


@pytest.mark.parametrize("path", SMALL)
def test_calls_without_prompts_accept_only_small_messages(server, path):
    error = send_one(server, path, b"\x7a" + b"\x84\x80\x20" + b"x" * (512 << 10 | 4))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(512 << 10) in error.details()


def test_limits_come_from_the_server(make_engine):
    limits = Limits(max_messages=2, max_stops=1, max_stop_chars=3, max_stop_ids=1, max_json_depth=3)
    with LiveServer(make_engine(), http=True, limits=limits) as server, server.client() as http:
        for path, content, field in (
            (CHAT, {"messages": [HELLO] * 3}, "messages"),
            (COMPLETIONS, {"prompt": "a", "stop": ["a", "b"]}, "stop"),
            (COMPLETIONS, {"prompt": "a", "stop": "abcd"}, "stop"),
            (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1, 2]}, "stop_token_ids"),
            (COMPLETIONS, {"prompt": "a", "metadata": {"a": [[]]}}, "body"),
        ):
            assert refusal(http.post(path, json=content))["param"] == field
        fits = dict(prompt="a", stop="abc", stop_token_ids=[1], max_tokens=1, metadata={"a": []})
        assert http.post(COMPLETIONS, json=fits).status_code == 200
        server.check_empty()


def test_a_full_pool_of_large_bodies_refuses_with_a_retry_time(monkeypatch):
    monkeypatch.setattr(generation, "_MAX_WAITING", 0)
    reader = generation.Reader(max_bytes=1 << 20, on_free=lambda num_bytes: None)

    async def ask():
        return await reader.run(5000, lambda: json.loads("{}"))

    with pytest.raises(ServiceError) as refused:
        asyncio.run(ask())
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    assert refused.value.retry_after


ANY = WireLimits(fields=10**9, numbers={}, other_numbers=10**9)


def has_more_fields(data: bytes, kind: type[Message], most: int) -> bool:
    found = find_excess(data, kind.DESCRIPTOR, replace(ANY, fields=most))
    assert found is None or found.path == ""
    return found is not None


def number_of_fields(message: Message) -> int:
    """On the wire: a packed list is one, an entry of a map three, and what is within."""
    count = 0
    for field, value in message.ListFields():
        if wire.is_map(field):
            inner = field.message_type.fields_by_name["value"].message_type
            parts = value.values() if inner else ()
            count += 3 * len(value) + sum(map(number_of_fields, parts))
        elif not field.is_repeated:
            count += 1 + (number_of_fields(value) if field.message_type else 0)
        elif field.message_type:
            count += len(value) + sum(map(number_of_fields, value))
        else:
            is_packed = field.type not in (field.TYPE_STRING, field.TYPE_BYTES)
            count += 1 if is_packed else len(value)
    return count


REQUESTS = (
    pb.GenerateRequest,
    vllm_engine_pb2.GenerateRequest,
    open_inference_pb2.ModelInferRequest,
)


@pytest.mark.parametrize("kind", REQUESTS)
def test_fields_are_counted_on_the_wire(kind, num_cases):
    @settings(
        max_examples=num_cases("messages counted on the wire", 150),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(wire.messages(kind.DESCRIPTOR), wire.broken(kind.DESCRIPTOR), st.integers(0, 400))
    def try_out(message, broken, most):
        data = message.SerializeToString()
        count = number_of_fields(message)
        assert not has_more_fields(data, kind, count)
        assert count == 0 or has_more_fields(data, kind, count - 1)
        assert has_more_fields(data, kind, most) == (count > most)
        has_more_fields(broken, kind, most)  # neither raises nor goes on for ever

    try_out()


ONCE = "peagle.v1.Generation/GenerateOnce"
VLLM = f"{vllm.SERVICE}/Generate"


def lists(descriptor: Descriptor, prefix: str = "") -> dict[str, FieldDescriptor]:
    """All lists of numbers within a message, by path."""
    found = {}
    for one in descriptor.fields:
        if one.message_type is not None:
            found |= lists(one.message_type, f"{prefix}{one.name}.")
        elif one.is_repeated and one.type not in (one.TYPE_STRING, one.TYPE_BYTES):
            found[prefix + one.name] = one
    return found


def with_list(kind: type[Message], path: str, values: list) -> Message:
    """A request that holds `values` at `path` and nothing else."""
    request = part = kind()
    *outer, name = path.split(".")
    for one in outer:
        inner = getattr(part, one)
        part = inner.add() if hasattr(inner, "add") else inner
    getattr(part, name).extend(values)
    return request


LISTS = [
    (method, kind, path)
    for method, kind in (
        (ONCE, pb.GenerateRequest),
        (VLLM, vllm_engine_pb2.GenerateRequest),
        (KSERVE, INFER),
    )
    for path in lists(kind.DESCRIPTOR)
]


@pytest.mark.parametrize(("method", "kind", "path"), LISTS)
def test_long_lists_of_numbers_are_refused_unparsed(server, method, kind, path):
    data = with_list(kind, path, [1] * 500_000).SerializeToString()
    # In pieces too: the parser joins them.
    piece = with_list(kind, path, [1] * 60).SerializeToString()
    for sent in (data, piece * 500):
        error = send_one(server, method, sent)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        name = "tokens" if path == "tokens.ids" else path
        assert error.details().startswith(f"{name}: ")
        assert "bytes are more than" in error.details()


@pytest.mark.parametrize(("method", "kind", "path"), LISTS)
def test_as_many_numbers_as_a_limit_allows_are_parsed(method, kind, path):
    """With numbers of every length on the wire."""
    field = lists(kind.DESCRIPTOR)[path]
    longest = {field.TYPE_UINT32: 2**32 - 1, field.TYPE_UINT64: 2**64 - 1, field.TYPE_BOOL: True}
    limits = replace(ANY, numbers={path: 20})
    for value in (longest.get(field.type, -1), 0):
        data = with_list(kind, path, [value] * 20).SerializeToString()
        assert find_excess(data, kind.DESCRIPTOR, limits) is None
    found = find_excess(
        with_list(kind, path, [0] * 201).SerializeToString(), kind.DESCRIPTOR, limits
    )
    assert (found.path, found.most) == (path, 20)
