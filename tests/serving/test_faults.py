"""Clients that leave, break off or read slowly: the answers of others are unchanged."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.errors import Code
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

ROOT = Path(__file__).parents[2]
LONG = pb.Stopping(max_tokens=60, ignore_eos=True)
Status = grpc.StatusCode
_SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 14),
    ("grpc.use_local_subchannel_pool", 1),
]
"""A separate connection whose HTTP/2 window keeps its initial size."""


@pytest.fixture(scope="module")
def ended() -> list:
    """Streams that have ended, as the server reports them."""
    return []


@pytest.fixture(scope="module")
def live(make_engine, ended) -> LiveServer:
    with LiveServer(make_engine(), report=ended.append) as server:
        yield server


@pytest.fixture
def reports(server, ended) -> list:
    """What the server reported since the test began."""
    ended.clear()
    return ended


KILLED = """
import sys, time, grpc
from serving.protos import peagle_v1_pb2 as pb, peagle_v1_pb2_grpc
stub = peagle_v1_pb2_grpc.GenerationStub(grpc.insecure_channel(sys.argv[1]))
stopping = pb.Stopping(max_tokens=90, ignore_eos=True)
start = lambda: stub.Generate(pb.GenerateRequest(text="a", stopping=stopping))
calls = [start()]
next(calls[0])
calls += [start() for _ in range(7)]
print("reading", flush=True)
time.sleep(600)
"""


def test_the_death_of_a_client_frees_everything(server, reports, pace):
    client = subprocess.Popen(
        [sys.executable, "-c", KILLED, server.address], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with client:
        pace.release(2)  # the streams would run for longer
        assert client.stdout.readline() == "reading\n"
        eventually(lambda: server.frontend.num_open == 8)
        client.send_signal(signal.SIGKILL)
        client.wait()
        server.check_freed(pace)
    assert [stream.code for stream in reports] == [Code.CANCELLED] * 8


@pytest.mark.slow
def test_a_client_that_stops_reading_delays_no_other(make_engine):
    """Its stream is larger than the HTTP/2 window: the server has to wait for the reader."""
    stopping = pb.Stopping(max_tokens=500, ignore_eos=True)
    with (
        LiveServer(make_engine(max_model_len=512, max_logprobs=64)) as server,
        grpc.insecure_channel(server.address, options=_SMALL_WINDOW) as narrow,
        grpc.insecure_channel(server.address) as channel,
    ):
        output = pb.Output(logprobs=64)
        request = pb.GenerateRequest(text="a", stopping=stopping, output=output)
        slow = peagle_v1_pb2_grpc.GenerationStub(narrow).Generate(request)
        first = next(slow)
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        for _ in range(2):
            whole = stub.GenerateOnce(
                pb.GenerateRequest(text="b", stopping=stopping), timeout=LIMIT
            )
            assert len(whole.sequences[0].token_ids) == 500
        # The engine has finished it and freed its slot and pages; only its reader has not.
        load = server.frontend.load
        assert (load.num_running, load.pages_used) == (0, 0)
        assert server.call(lambda: server.frontend.num_open) == 1
        deltas = [first, *slow]
        server.check_empty()
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert (len(tokens), len(logprobs)) == (500, 500)
    assert {len(one.alternatives) for one in logprobs} == {64}
    # The unread output arrives as one delta.
    assert max(len(delta.token_ids) for delta in deltas) > 100


def test_health_goes_down_with_the_engine(make_engine):
    from serving.app import _announce

    server = LiveServer(make_engine())
    server.call(lambda: asyncio.ensure_future(_announce(server.frontend, server.server)))
    statuses = health_pb2.HealthCheckResponse
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="peagle.v1.Generation"))
        assert next(watch).status == statuses.SERVING

        def die(*args):
            raise RuntimeError("out of luck")

        server.engine.programs.round = die
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GenerateOnce(pb.GenerateRequest(text="a", stopping=LONG))
        assert caught.value.code() is Status.INTERNAL
        assert next(watch).status == statuses.NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest()).status == statuses.NOT_SERVING
        watch.cancel()
    server.close()


def test_aborting_while_streams_end_is_safe(server, reports):
    """Aborts, cancels and the ends themselves race for the same requests."""
    with server.peagle() as stub:
        names = [f"r{i}" for i in range(60)]
        stopping = pb.Stopping(max_tokens=6, ignore_eos=True)
        calls = [
            stub.Generate(pb.GenerateRequest(text="a", request_id=name, stopping=stopping))
            for name in names
        ]

        def abort() -> None:
            for name in names:
                stub.Abort(pb.AbortRequest(request_ids=[name]))

        threads = [threading.Thread(target=abort) for _ in range(3)]
        for thread in threads:
            thread.start()
        for call in calls[::3]:
            call.cancel()
        for thread in threads:
            thread.join()
        codes = []
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                list(call)
            codes.append(call.code())
    assert set(codes) == {Status.OK, Status.CANCELLED}
    assert Status.CANCELLED in codes[::3]
    assert set(codes[1::3]) == {Status.OK}
    server.check_empty()
    by_id = Counter(stream.ask.request_id for stream in reports)
    assert set(by_id.values()) == {1}
