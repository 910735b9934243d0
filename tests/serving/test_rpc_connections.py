"""gRPC clients that keep the server waiting, and too many connections."""

import contextlib
import threading
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.frontend import State
from serving.rpc import guard
from serving.rpc import health as health_service
from serving.rpc.server import RpcServer
from tests.serving.live import LiveServer
from tests.serving.test_http_connections import connect, read_all
from tests.waiting import LIMIT, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
CALLS = (
    "peagle.v1.Generation/GenerateOnce",
    "peagle.v1.Generation/Generate",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def status_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(
            health_pb2.HealthCheckRequest(), timeout=LIMIT, wait_for_ready=True
        ).status


def test_silent_connections_are_closed_and_make_room(make_engine):
    server = LiveServer(make_engine(), max_connections=3, handshake_seconds=1.0, idle_seconds=1.0)
    try:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(server.address)) for _ in range(8)]
            held[0].sendall(PREFACE)
            held[1].sendall(PREFACE + SETTINGS)
            # Those beyond the limit end at once, the others when their time is up.
            for one in held:
                read_all(one)
            assert status_of(server.address) == SERVING
    finally:
        server.close()


@pytest.mark.parametrize("seconds", [1e-6, 30 * 86_400.0, 1e300])
def test_any_time_limit_and_any_queue_are_served(server, seconds, monkeypatch):
    """gRPC's options are 32-bit integers, so 30 days in milliseconds do not fit."""
    config = replace(server.frontend.config, max_waiting=2**40)
    monkeypatch.setattr(server.frontend, "config", config)

    async def start_and_stop() -> int:
        kinds = ("handshake_seconds", "idle_seconds", "max_connection_seconds")
        another = RpcServer(server.frontend, **dict.fromkeys(kinds, seconds))
        port = await another.start("127.0.0.1", 0)
        await another.stop(0)
        return port

    assert server.run(start_and_stop()) > 0


@pytest.fixture
def never():
    """A stream of requests in which none comes before the test ends."""
    released = threading.Event()

    def requests():
        released.wait(60)
        yield from ()

    yield requests
    released.set()


def status(address: str, method: str, requests) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{method}")(requests(), timeout=LIMIT)
        with pytest.raises(grpc.RpcError):
            list(call)
        return call.code(), call.details()


@pytest.mark.parametrize("method", CALLS)
def test_a_request_that_does_not_come_ends_the_call(server, never, monkeypatch, method):
    monkeypatch.setattr(guard, "_MESSAGE_SECONDS", 0.2)
    code, details = status(server.address, method, never)
    assert (code, details) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the request did not come whole within 0.2 s",
    )


@pytest.mark.parametrize("method", CALLS)
def test_a_call_without_a_request_is_refused(server, method):
    code, _ = status(server.address, method, lambda: iter(()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_without_a_token_is_refused_before_its_request_comes(make_engine, never):
    server = LiveServer(make_engine(), tokens=[b"sesame"])
    try:
        for method in CALLS[:2]:
            code, _ = status(server.address, method, never)
            assert code is grpc.StatusCode.UNAUTHENTICATED
    finally:
        server.close()


def test_health_watches_are_bounded(server, monkeypatch):
    monkeypatch.setattr(health_service, "_MOST_WATCHES", 2)
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()

        refusals = []

        def is_accepted() -> bool:
            call = stub.Watch(request, timeout=LIMIT)
            try:
                return next(call).status == SERVING
            except grpc.RpcError as error:
                refusals.append((error.code(), error.details()))
                return False
            finally:
                call.cancel()

        eventually(is_accepted)
        held = [stub.Watch(request, timeout=LIMIT) for _ in range(2)]
        assert [next(one).status for one in held] == [SERVING] * 2
        assert not is_accepted()
        assert stub.Check(request, timeout=LIMIT).status == SERVING
        held[0].cancel()
        eventually(is_accepted)
        held[1].cancel()
        code, details = refusals[-1]
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.endswith("call Check instead")


Status = health_pb2.HealthCheckResponse
SERVICES = ("", "peagle.v1.Generation")


@pytest.fixture
def own(make_engine):
    """A server for one test, which may drain it."""
    with LiveServer(make_engine()) as server:
        yield server


@pytest.fixture
def health(own):
    with grpc.insecure_channel(own.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def watch(health, service: str):
    """An open watch that has reported SERVING."""
    call = health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT)
    assert next(call).status == Status.SERVING
    return call


@pytest.mark.parametrize("service", SERVICES)
def test_a_watcher_sees_the_drain_after_another_watcher_left(own, health, service):
    staying, leaving = watch(health, service), watch(health, service)
    leaving.cancel()
    eventually(lambda: own.server._health._num_watches == 1, "one watch has ended")
    joining = watch(health, service)
    own.call(own.server.show, State.DRAINING)
    assert next(staying).status == next(joining).status == Status.NOT_SERVING
    own.call(own.server.show, State.SERVING)
    assert next(staying).status == next(joining).status == Status.SERVING


def test_an_unknown_service_is_reported_as_unknown(own, health):
    request = health_pb2.HealthCheckRequest(service="nobody.Knows")
    with pytest.raises(grpc.RpcError, match=r"nobody\.Knows") as refused:
        health.Check(request, timeout=LIMIT)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    call = health.Watch(request, timeout=LIMIT)
    assert next(call).status == Status.SERVICE_UNKNOWN
    call.cancel()


def test_open_watches_do_not_delay_the_stop(own, health):
    """They get the last status first."""
    calls = [watch(health, service) for service in SERVICES]
    own.call(own.server.show, State.DRAINING)
    own.run(own.server.stop(grace=10 * LIMIT))
    assert [[answer.status for answer in call] for call in calls] == [[Status.NOT_SERVING]] * 2
