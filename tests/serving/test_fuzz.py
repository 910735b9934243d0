"""Thousands of malformed requests: each gets a status, and the server keeps serving.

The tests go over the descriptors of the services; a new service joins in `SERVICES`.
"""

import asyncio
import contextlib
import random
import re
import socket

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serving.protos import open_inference_pb2, vllm_engine_pb2
from serving.protos import peagle_v1_pb2 as pb
from serving.rpc import open_inference, vllm
from tests.serving import wire
from tests.serving.live import LiveServer
from tests.waiting import LIMIT


def service(file: FileDescriptor, name: str) -> ServiceDescriptor:
    return file.services_by_name[name]


SERVICES = {
    "peagle.v1.Generation": service(pb.DESCRIPTOR, "Generation"),
    vllm.SERVICE: service(vllm_engine_pb2.DESCRIPTOR, "VllmEngine"),
    open_inference.SERVICE: service(open_inference_pb2.DESCRIPTOR, "GRPCInferenceService"),
}
"""By the name under which they are served."""
METHODS = {
    f"{name}/{method.name}": method
    for name, service in SERVICES.items()
    for method in service.methods
}
Status = grpc.StatusCode
ANSWERS = {Status.OK, Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.ALREADY_EXISTS}
ANSWERS |= {Status.RESOURCE_EXHAUSTED, Status.FAILED_PRECONDITION, Status.UNIMPLEMENTED}
"""Valid statuses for a message that the server could parse. A hang is DEADLINE_EXCEEDED."""
MAX_BYTES = 1 << 20
BATCH = 25
HELLO = pb.GenerateRequest(text="hello there", stopping=pb.Stopping(max_tokens=12))

bounded = lambda examples: settings(
    max_examples=examples,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a failure names its message; no need to shrink
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def live(make_engine) -> LiveServer:
    with LiveServer(make_engine(), with_reflection=True, max_message_bytes=MAX_BYTES) as server:
        yield server


@pytest.fixture
def server(live):
    """The shared server, which must answer as before and be empty after the test."""
    with live.peagle() as stub:
        before = stub.GenerateOnce(HELLO).sequences
        yield live
        assert stub.GenerateOnce(HELLO).sequences == before
    live.check_empty()


class Client:
    """Sends messages as bytes, many at a time, from an event loop of its own."""

    def __init__(self, address: str):
        self._loop = asyncio.new_event_loop()
        self._channel = self._loop.run_until_complete(self._open(address))

    async def _open(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])

    def send(self, path: str, method: MethodDescriptor, batch: list[list[bytes]]) -> list:
        """One call for each item of `batch`, all at once; their errors, None where none was."""
        calls = (self._call(path, method, requests) for requests in batch)

        async def together():
            return await asyncio.gather(*calls)

        return self._loop.run_until_complete(together())

    async def _call(self, path: str, method: MethodDescriptor, requests: list[bytes]):
        kinds = (
            "stream" if x else "unary" for x in (method.client_streaming, method.server_streaming)
        )
        call = getattr(self._channel, "_".join(kinds))(f"/{path}")
        sent = iter(requests) if method.client_streaming else requests[0]
        answers = []
        try:
            answer = call(sent, timeout=LIMIT)
            if method.server_streaming:
                answers = [one async for one in answer]
            else:
                await answer
        except grpc.aio.AioRpcError as error:
            return error
        return in_stream_error(answers) if method.client_streaming else None

    def close(self) -> None:
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()


def in_stream_error(answers: list[bytes]) -> grpc.aio.AioRpcError | None:
    """The error that the responses of a stream report: an unsound one, else the first."""
    messages = [
        open_inference_pb2.ModelStreamInferResponse.FromString(one).error_message for one in answers
    ]
    errors = []
    for message in filter(None, messages):
        code, _, details = message.partition(": ")
        nothing = grpc.aio.Metadata()
        errors.append(grpc.aio.AioRpcError(Status[code], nothing, nothing, details=details))
    unsound = [error for error in errors if error.code() not in ANSWERS]
    return next(iter(unsound + errors), None)


def send_one(server: LiveServer, path: str, request: Message | bytes) -> grpc.aio.AioRpcError:
    """The error of a call; fails if there is none."""
    client = Client(server.address)
    data = request if isinstance(request, bytes) else request.SerializeToString()
    (error,) = client.send(path, METHODS[path], [[data]])
    client.close()
    assert error is not None
    return error


@pytest.fixture
def client(server):
    made = Client(server.address)
    yield made
    made.close()


def check(error: grpc.aio.AioRpcError | None, method: MethodDescriptor, request) -> None:
    """Fails unless the status is one of the valid ones."""
    code = Status.OK if error is None else error.code()
    assert code in ANSWERS, f"{method.full_name}: {code} {error.details()} for {request}"
    if code is not Status.INVALID_ARGUMENT:
        return
    assert error.details()
    status = rpc_status.from_call(_AsCall(error))
    for detail in status.details if status else ():
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            for violation in violations.field_violations:
                assert wire.has_path(method.input_type, violation.field), (violation.field, request)


def num_batches(method: MethodDescriptor, num_cases, default: int) -> int:
    """Batches to try; messages without fields are soon known."""
    if not method.input_type.fields:
        default = 1
    return -(-num_cases("messages to gRPC services", default * BATCH) // BATCH)


class _AsCall(grpc.Call):
    """What `rpc_status.from_call` wants, of an error."""

    def __init__(self, error: grpc.aio.AioRpcError):
        self.code, self.details = error.code, error.details
        self.trailing_metadata = error.trailing_metadata


_AsCall.__abstractmethods__ = frozenset()


@pytest.mark.sampled(3, slow=0)
@pytest.mark.parametrize("path", METHODS)
def test_any_message_gets_a_fitting_status(server, client, path, num_cases):
    method = METHODS[path]
    most = 4 if method.client_streaming else 1
    one = wire.messages(method.input_type)
    batches = st.lists(st.lists(one, min_size=1, max_size=most), min_size=BATCH, max_size=BATCH)

    @bounded(num_batches(method, num_cases, 16))
    @given(batches)
    def try_out(batch):
        data = [[request.SerializeToString() for request in requests] for requests in batch]
        for requests, error in zip(batch, client.send(path, method, data), strict=True):
            check(error, method, requests)

    try_out()


NO_MESSAGE = re.compile(r"no such message|more than \d+ numbers take|more than the \d+ fields")
"""Valid errors for bytes that do not parse, or are too large to be parsed."""


@pytest.mark.sampled(4, slow=4)
@pytest.mark.parametrize("path", METHODS)
def test_bytes_that_are_no_message_get_a_status(server, client, path, num_cases):
    method = METHODS[path]
    batches = st.lists(wire.broken(method.input_type), min_size=BATCH, max_size=BATCH)
    read = GetMessageClass(method.input_type).FromString

    @bounded(num_batches(method, num_cases, 8))
    @given(batches)
    def try_out(batch):
        errors = client.send(path, method, [[data] for data in batch])
        for data, error in zip(batch, errors, strict=True):
            try:
                request = read(data)
            except DecodeError:
                assert error.code() is Status.INVALID_ARGUMENT
                assert NO_MESSAGE.search(error.details()), error.details()
            else:
                check(error, method, request)

    try_out()


@pytest.mark.sampled(2, slow=3)
@pytest.mark.parametrize("path", METHODS)
def test_messages_beyond_the_limit_are_refused_unread(server, client, path):
    data = [[b"\x00" * size] for size in (MAX_BYTES + 1, 8 * MAX_BYTES)]
    for error in client.send(path, METHODS[path], data):
        assert error.code() is Status.RESOURCE_EXHAUSTED


def test_methods_that_are_not_there_are_unimplemented(server, client):
    method = METHODS["peagle.v1.Generation/Abort"]
    for path in ("peagle.v1.Generation/Nothing", "nobody.Knows/It", "x/", "x"):
        assert client.send(path, method, [[b""]])[0].code() is Status.UNIMPLEMENTED


def test_long_prompts_and_many_sequences_at_once(server, client):
    """The most expensive requests within the limits, more of them than the queue holds."""
    path = "peagle.v1.Generation/GenerateOnce"
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5] * 90), n=16)
    request.sampling.MergeFrom(pb.Sampling(temperature=100.0, top_k=2**31 - 1, top_p=1e-45))
    request.sampling.MergeFrom(pb.Sampling(min_p=1.0, seed=2**63 - 1))
    request.stopping.MergeFrom(pb.Stopping(max_tokens=2**32 - 1, stop=["z" * 300] * 16))
    request.output.logprobs = 3
    errors = client.send(path, METHODS[path], [[request.SerializeToString()]] * 40)
    codes = {Status.OK if error is None else error.code() for error in errors}
    assert codes == {Status.OK, Status.RESOURCE_EXHAUSTED}


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def _frame(rng: random.Random) -> bytes:
    """An HTTP/2 frame with a correct length; everything else is random."""
    content = rng.randbytes(rng.choice((0, 1, 4, 5, 8, 40)))
    head = len(content).to_bytes(3, "big") + bytes([rng.randrange(12), rng.randrange(256)])
    return head + rng.choice((0, 1, 3, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big") + content


def _garbage(rng: random.Random) -> bytes:
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(1, 400))
        case 1:
            return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        case 2:
            return PREFACE + rng.randbytes(rng.randrange(1, 200))
        case 3:
            return PREFACE[: rng.randrange(1, len(PREFACE))]
    return PREFACE + SETTINGS + b"".join(_frame(rng) for _ in range(rng.randrange(1, 8)))


def test_bytes_that_are_no_grpc_do_no_harm(server, num_cases):
    """The server may answer or hang up; it goes on serving others, as the fixture checks."""
    rng = random.Random(7)
    host, port = server.address.split(":")
    kept = []
    for number in range(num_cases("connections that send garbage to gRPC", 600)):
        connection = socket.create_connection((host, int(port)), timeout=LIMIT)
        with contextlib.suppress(OSError):  # it has hung up
            connection.sendall(_garbage(rng))
        if number % 10 == 0 and len(kept) < 100:
            kept.append(connection)  # says no more, and stays
        else:
            connection.close()
    with server.peagle() as stub:
        assert stub.GetStats(pb.GetStatsRequest(), timeout=LIMIT).state == "serving"
    for connection in kept:
        connection.close()
