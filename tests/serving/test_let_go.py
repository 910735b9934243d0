"""A refused call's memory is freed at once, without a garbage collection."""

import gc
import tracemalloc

import grpc
import pytest

from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.serving.live import LiveServer

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
