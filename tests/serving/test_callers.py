"""A caller is a bearer token: it aborts and collides with its own requests only, and learns of no others."""

import contextlib
import threading

import grpc
import httpx
import pytest

from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc, vllm_engine_pb2
from serving.rpc import vllm
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

LONG = pb.GenerateRequest(
    request_id="x", text="a", stopping=pb.Stopping(max_tokens=40, ignore_eos=True)
)
BODY = dict(prompt="a", max_tokens=3, ignore_eos=True, request_id="x")


@pytest.fixture(scope="module")
def live(make_engine):
    server = LiveServer(make_engine(), http=True, tokens=(b"first", b"second"))
    yield server
    server.close()


class Caller:
    """A client with a token, or with none."""

    def __init__(self, server: LiveServer, token: str | None):
        self.server, self.channel = server, grpc.insecure_channel(server.address)
        self.stub = peagle_v1_pb2_grpc.GenerationStub(self.channel)
        self.header = f"Bearer {token}" if token else None
        self.metadata = (("authorization", self.header),) if token else ()

    def open(self):
        """A stream whose request was accepted."""
        stream = self.stub.Generate(LONG, metadata=self.metadata, timeout=LIMIT)
        stream.initial_metadata()
        return stream

    def abort(self, request_id: str = "x") -> int:
        request = pb.AbortRequest(request_ids=[request_id])
        return self.stub.Abort(request, metadata=self.metadata, timeout=LIMIT).aborted

    def abort_as_gateways_do(self) -> bytes:
        call = self.channel.unary_unary(f"/{vllm.SERVICE}/Abort")
        request = vllm_engine_pb2.AbortRequest(request_ids=["x"])
        return call(request.SerializeToString(), metadata=self.metadata, timeout=LIMIT)

    def post(self, **others: str) -> httpx.Response:
        headers = {"authorization": self.header} if self.header else {}
        url = f"http://{self.server.http_address}/v1/completions"
        return httpx.post(url, json=BODY | others, headers=headers, timeout=LIMIT)


@pytest.fixture
def callers(server):
    with contextlib.ExitStack() as stack:
        made = [Caller(server, token) for token in ("first", "second")]
        for one in made:
            stack.enter_context(one.channel)
        yield made


def reason(stream) -> int:
    return list(stream)[-1].finish.reason


def test_only_the_caller_itself_aborts_its_request(server, callers):
    first, second = callers
    with server.paced() as pace:
        stream = first.open()
        assert second.abort() == second.abort("unknown") == 0
        assert second.abort_as_gateways_do() == b""
        assert server.frontend.num_open == 1
        pace.release(1_000_000)
        assert reason(stream) == pb.FINISH_REASON_LENGTH
    with server.paced():
        stream = first.open()
        assert first.abort() == 1
    assert reason(stream) == pb.FINISH_REASON_ABORT
    with server.paced():
        stream = first.open()
        first.abort_as_gateways_do()
    assert reason(stream) == pb.FINISH_REASON_ABORT


def test_ids_are_unique_among_a_callers_own(server, callers):
    """And the answer to an id is the same whether or not another caller runs it."""
    first, second = callers
    with server.paced() as pace:
        mine, theirs = first.open(), second.open()
        for caller in callers:
            with pytest.raises(grpc.RpcError) as refused:
                caller.open().result()
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
            assert caller.post().status_code == 409
        assert second.abort() == 1
        pace.release(1_000_000)
        assert reason(theirs) == pb.FINISH_REASON_ABORT
        assert reason(mine) == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("size", [1, 10_000])
def test_an_id_that_another_caller_runs_is_free_over_http(server, callers, size):
    """Large bodies are read in a thread, which must know the caller too."""
    first, second = callers
    with server.paced() as pace:
        stream = first.open()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(second.post(user="u" * size)))
        asking.start()
        eventually(lambda: server.frontend.num_open == 2)
        (theirs,) = (
            one.ask for one in server.frontend.admission.streams if one.ask.method[0] == "/"
        )
        assert theirs.caller
        assert first.post(user="u" * size).status_code == 409
        pace.release(1_000_000)
        asking.join(LIMIT)
        assert (answers[0].status_code, answers[0].headers["x-request-id"]) == (200, "x")
        assert reason(stream) == pb.FINISH_REASON_LENGTH


def test_tokens_are_in_no_report(server, callers):
    with server.paced() as pace:
        stream = callers[0].open()
        (open_one,) = server.frontend.admission.streams
        assert "first" not in repr(open_one.ask)
        assert open_one.ask.caller
        pace.release(1_000_000)
        list(stream)


def test_without_tokens_all_are_one_caller(make_engine):
    """Clients send made-up tokens to servers that want none: these must not tell them apart."""
    server = LiveServer(make_engine(), http=True)
    first, second = Caller(server, "made up"), Caller(server, None)
    with first.channel, second.channel:
        with server.paced():
            stream = first.open()
            assert second.post().status_code == 409
            assert second.abort() == 1
        assert reason(stream) == pb.FINISH_REASON_ABORT
    server.check_empty()
    server.close()
