"""`grpc.health.v1.Health`: every watcher sees every change, whatever other watchers do."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.frontend import State
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

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
