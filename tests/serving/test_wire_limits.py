"""Limits of a gRPC message are checked on its bytes, before it is parsed."""

from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.protos import open_inference_pb2, vllm_engine_pb2
from serving.protos import peagle_v1_pb2 as pb
from serving.rpc import open_inference, vllm
from serving.rpc.wire import WireLimits, find_excess
from tests.serving import wire
from tests.serving.test_fuzz import send_one

INFER = open_inference_pb2.ModelInferRequest
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


PEAGLE = "peagle.v1.Generation/GenerateOnce"
VLLM, KSERVE = f"{vllm.SERVICE}/Generate", f"{open_inference.SERVICE}/ModelInfer"


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
        (PEAGLE, pb.GenerateRequest),
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
