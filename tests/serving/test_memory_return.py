"""Memory goes back to the system after large requests, however many there were."""

import asyncio
import gc
import threading
import tracemalloc

import grpc
import pytest

from serving import memory, worker
from serving.memory import LARGE, MemoryReturn
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually, soon


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(memory, "_SECONDS", 0.01)


def test_large_requests_share_a_trim_and_small_ones_make_none(at_once):
    threads = []

    async def ask():
        returned = MemoryReturn(lambda: threads.append(threading.current_thread()))
        returned.schedule(LARGE - 1)
        assert returned._timer is None
        for _ in range(50):
            returned.schedule(LARGE)
        await soon(lambda: threads)
        returned.schedule(LARGE)
        await soon(lambda: len(threads) == 2)
        returned.schedule(LARGE)
        returned.close()
        await asyncio.sleep(0.1)

    asyncio.run(ask())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_large_requests_of_every_protocol_are_noticed(make_engine, at_once):
    server = LiveServer(make_engine(), http=True)
    trims = []
    server.frontend.memory._trim = lambda: trims.append(1)
    text = "a" * (2 * LARGE)
    assert server.post("/v1/completions", prompt=text).status_code == 400
    eventually(lambda: trims)
    eventually(lambda: server.frontend.memory._timer is None)
    trims.clear()
    with server.peagle() as stub, pytest.raises(grpc.RpcError, match="characters"):
        stub.GenerateOnce(pb.GenerateRequest(text=text), timeout=LIMIT)
    eventually(lambda: trims)
    server.close()


def test_the_engine_returns_what_compiling_has_left(make_engine, monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr(worker, "c_library_trim", trimmed.set)
    server = LiveServer(make_engine())
    try:
        assert trimmed.wait(LIMIT)
        assert server.frontend.batch_sizes_pending == 0
    finally:
        server.close()


MEGABYTES = 2
CALLS = 12


@pytest.fixture
def counted():
    """Bytes that Python has allocated, with the garbage collector off."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    gc.enable()


@pytest.mark.parametrize("method", ["GenerateOnce", "Generate"])
def test_a_refused_message_is_freed(server: LiveServer, method, counted):
    request = pb.GenerateRequest(text="a " * (MEGABYTES << 19))
    with grpc.insecure_channel(server.address) as channel:
        call = getattr(peagle_v1_pb2_grpc.GenerationStub(channel), method)

        def refuse() -> None:
            with pytest.raises(grpc.RpcError) as caught:
                list(call(request)) if method == "Generate" else call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        refuse()  # what the first call makes stays
        before = counted()
        for _ in range(CALLS):
            refuse()
        server.call(lambda: None)
        # One call may still be on its way out.
        assert counted() - before < CALLS * MEGABYTES * 2**20 / 3
