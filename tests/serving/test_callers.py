"""A caller is a bearer token: it aborts and collides with its own requests only, and learns of no
others.

Work of callers is done in turn.
"""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import grpc
import httpx
import pytest

from serving import constraints
from serving.errors import Code, ServiceError
from serving.networks import network
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc, vllm_engine_pb2
from serving.rpc import calls, vllm
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually, soon

LONG = pb.GenerateRequest(
    request_id="x", text="a", stopping=pb.Stopping(max_tokens=40, ignore_eos=True)
)
BODY = dict(prompt="a", max_tokens=3, ignore_eos=True, request_id="x")


@pytest.fixture(scope="module")
def live(make_engine):
    with LiveServer(make_engine(), http=True, tokens=(b"first", b"second")) as server:
        yield server


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


def test_counts_are_those_of_all_callers_and_need_a_token(server, callers):
    first, second = callers
    url = f"http://{server.http_address}/metrics"

    def counted(caller: Caller) -> str:
        text = httpx.get(url, headers={"authorization": caller.header}).text
        return next(x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total"))

    before = counted(second)
    assert first.post().status_code == 200
    eventually(lambda: counted(second) != before)
    assert counted(first) == counted(second)
    assert httpx.get(url).status_code == 401


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


def test_constraints_know_the_address_of_their_client(server, callers, monkeypatch):
    """It tells clients apart on a server without tokens."""
    addresses = []

    async def compile(*args, address: str, **others):
        addresses.append(address)
        raise ServiceError(Code.INVALID_ARGUMENT, "seen")

    monkeypatch.setattr(server.frontend._constraints, "compile", compile)
    assert callers[0].post(response_format={"type": "json_object"}).status_code == 400
    peagle = pb.GenerateRequest(text="a", structured=pb.Structured(json_object=True))
    inputs = vllm_engine_pb2.TokenizedInput(input_ids=[5])
    params = vllm_engine_pb2.SamplingParams(json_object=True)
    gateway = vllm_engine_pb2.GenerateRequest(tokenized=inputs, sampling_params=params)
    methods = {"peagle.v1.Generation/GenerateOnce": peagle, f"{vllm.SERVICE}/Generate": gateway}
    for method, request in methods.items():
        call = callers[0].channel.unary_stream(f"/{method}")
        with pytest.raises(grpc.RpcError, match="seen"):
            list(call(request.SerializeToString(), metadata=callers[0].metadata, timeout=LIMIT))
    assert addresses == ["127.0.0.1"] * 3


def test_the_address_of_a_grpc_peer():
    for peer, address in (
        ("ipv4:192.0.2.1:50123", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:50123", "2001:db8::1"),
        ("ipv6:[fe80::1%25eth0]:50123", "fe80::1%eth0"),
        ("unix:", ""),
    ):
        assert calls.address(SimpleNamespace(peer=lambda peer=peer: peer)) == address


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


class Turns:
    """A pool of two threads, whose functions end when a test releases them."""

    def __init__(self):
        self.pool = constraints._FairPool("turns", 2)
        self.begun: list[str] = []
        self._permits = threading.Semaphore(0)

    def ask(self, origin: str, *numbers: int) -> list[asyncio.Task]:
        """Functions of one caller."""

        def work(name: str) -> str:
            self.begun.append(name)
            assert self._permits.acquire(timeout=LIMIT)
            return name

        run = lambda name: self.pool.run(origin, lambda: work(name))
        return [asyncio.create_task(run(f"{origin}{number}")) for number in numbers]

    def release(self, count: int) -> None:
        self._permits.release(count)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.pool._waiting.values()))


def take_turns(work) -> object:
    """Runs `work(turns)`; afterwards nothing may wait and both threads must be free."""

    async def main():
        turns = Turns()
        result = await asyncio.wait_for(work(turns), LIMIT)
        await soon(lambda: turns.pool._num_free == 2)
        assert (turns.pool._waiting, turns.pool._running) == ({}, {})
        turns.pool.close()
        return result

    return asyncio.run(main())


def test_a_full_queue_refuses_the_caller_that_waits_with_most(monkeypatch):
    monkeypatch.setattr(constraints, "_MAX_WAITING", 4)

    async def work(turns):
        many = turns.ask("a", *range(6))
        await soon(lambda: len(turns.begun) == 2)
        (more,) = turns.ask("a", 6)
        with pytest.raises(ServiceError, match="of this client wait") as caught:
            await more
        assert (caught.value.code, caught.value.retry_after) == (Code.RESOURCE_EXHAUSTED, 1.0)
        few = turns.ask("b", 0, 1)  # a and b then have two each that wait
        await soon(lambda: many[4].done() and many[5].done())
        (equal,) = turns.ask("b", 2)
        with pytest.raises(ServiceError, match="of this client wait"):
            await equal
        third = turns.ask("c", 0)
        await soon(lambda: sum(one.done() for one in (*many, *few, *third)) == 3)
        turns.release(9)
        return await asyncio.gather(*many, *few, *third, return_exceptions=True)

    results = take_turns(work)
    assert [one for one in results if isinstance(one, str)] == ["a0", "a1", "a2", "b0", "b1", "c0"]


def test_what_is_cancelled_while_it_waits_leaves_nothing_and_what_runs_keeps_its_turn():
    async def work(turns):
        running = turns.ask("a", 0, 1)
        await soon(lambda: len(turns.begun) == 2)
        waiting, other = turns.ask("a", 2, 3), turns.ask("b", 0)
        await soon(lambda: turns.num_waiting == 3)
        cancelled = [*running, waiting[0]]
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        assert turns.num_waiting == len(turns.begun) == 2
        turns.release(9)
        assert await asyncio.gather(waiting[1], *other) == ["a3", "b0"]
        return turns.begun

    assert sorted(take_turns(work)) == ["a0", "a1", "a3", "b0"]


def test_an_ipv6_customer_is_one_client():
    customers = {"192.0.2.7": "192.0.2.7", "::ffff:192.0.2.7": "192.0.2.7", "": ""}
    customers |= {"2001:db8:0:1:2:3:4:5": "2001:db8:0:1::", "fe80::1%eth0": "fe80::"}
    assert {address: network(address) for address in customers} == customers
