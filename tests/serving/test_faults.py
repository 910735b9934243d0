"""Clients that leave, break off or read slowly, one or many at once: the answers of all others are
unchanged.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peagle_jax import SamplingParams
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
    """Room for long streams of large messages, for readers that do not read them."""
    server = LiveServer(make_engine(max_model_len=512, max_logprobs=64), report=ended.append)
    yield server
    server.close()


@pytest.fixture
def reports(server, ended) -> list:
    """What the server reported since the test began."""
    ended.clear()
    return ended


@pytest.fixture(scope="module")
def alone(make_engine):
    """A separate engine, which generates the expected text; it uses the server's programs."""
    return make_engine(max_model_len=512, max_logprobs=64)


@pytest.fixture(scope="module")
def narrow(make_engine) -> LiveServer:
    """Few pages, so that requests preempt each other."""
    server = LiveServer(make_engine(num_pages=32))
    yield server
    server.close()


class Crowd:
    """Clients that send short requests and end some of them: by cancelling, by a deadline, by a
    lost connection.

    Attributes:
      codes: how often a call ended with each status.
    """

    def __init__(self, address: str, *, seed: int):
        self.address = address
        self.codes: Counter[Status] = Counter()
        self._rng = np.random.default_rng(seed)

    async def run(self, count: int, *, concurrency: int) -> None:
        left = iter(range(count))
        async with grpc.aio.insecure_channel(self.address) as channel:

            async def client() -> None:
                for _ in left:
                    self.codes[await self._one(channel)] += 1

            await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _one(self, shared: grpc.aio.Channel) -> Status:
        rng = self._rng
        request = pb.GenerateRequest(
            tokens=pb.TokenIds(ids=rng.integers(2, 120, rng.integers(1, 12))),
            stopping=pb.Stopping(max_tokens=int(rng.integers(1, 9)), ignore_eos=True),
            sampling=pb.Sampling(temperature=float(rng.choice([0.0, 1.0]))),
        )
        kind = rng.choice(
            ["plain", "once", "deadline", "cancel", "leave", "wrong"],
            p=[0.3, 0.25, 0.2, 0.2, 0.03, 0.02],
        )
        stub = peagle_v1_pb2_grpc.GenerationStub(shared)
        match kind:
            case "once":
                return await self._end(stub.GenerateOnce(request))
            case "deadline":
                timeout = float(rng.exponential(0.2))
                return await self._end(stub.Generate(request, timeout=timeout))
            case "cancel":
                return await self._cancel(stub.Generate(request))
            case "leave":
                return await self._leave(request)
            case "wrong":
                request.sampling.top_p = -1.0
        return await self._end(stub.Generate(request))

    async def _end(self, call: grpc.aio.Call) -> Status:
        try:
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
        except grpc.RpcError:
            pass
        return await call.code()

    async def _cancel(self, call: grpc.aio.Call) -> Status:
        await asyncio.sleep(float(self._rng.choice([0.0, 0.001, 0.01, 0.1])))
        call.cancel()
        return await call.code()

    async def _leave(self, request: pb.GenerateRequest) -> Status:
        """Breaks the connection, and with it the call."""
        async with grpc.aio.insecure_channel(
            self.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = peagle_v1_pb2_grpc.GenerationStub(channel).Generate(request)
            await asyncio.sleep(float(self._rng.choice([0.005, 0.05])))
            await channel.close()
            return await call.code()


def resident_mib() -> float:
    """Memory of this process, in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.parametrize(
    "number",
    [pytest.param(1000, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.exhaustive)],
)
def test_thousands_of_requests_end_once_each_and_leave_nothing(server, reports, number):
    """Cancels, deadlines and lost connections among 64 at once."""
    crowd = Crowd(server.address, seed=3)
    asyncio.run(crowd.run(number // 5, concurrency=64))
    before = resident_mib()
    kept = len(reports)
    asyncio.run(crowd.run(number - number // 5, concurrency=64))
    server.check_empty()
    codes = crowd.codes
    assert codes.total() == number
    # DEADLINE_EXCEEDED, CANCELLED: as asked. The queue is never full: 64 fit.
    assert codes.keys() == {
        Status.OK,
        Status.CANCELLED,
        Status.DEADLINE_EXCEEDED,
        Status.INVALID_ARGUMENT,
    }
    assert codes[Status.OK] > number // 2
    assert min(codes.values()) > number // 100
    assert len({stream.number for stream in reports}) == len(reports) > kept
    assert all(stream.code is not None for stream in reports)
    assert Counter(stream.code for stream in reports)[Code.OK] >= codes[Status.OK]
    reports.clear()
    assert resident_mib() - before < 64


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
def test_a_client_that_stops_reading_delays_no_other(server):
    """Its stream is larger than the HTTP/2 window, so that the server has to wait for
    the reader.
    """
    stopping = pb.Stopping(max_tokens=500, ignore_eos=True)
    with (
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
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert (len(tokens), len(logprobs)) == (500, 500)
    assert {len(one.alternatives) for one in logprobs} == {64}
    # The unread output arrives as one delta.
    assert max(len(delta.token_ids) for delta in deltas) > 100


def requests_of_every_kind(*, count: int, temperature: float) -> list[tuple[list[int], dict]]:
    """Prompts and sampling parameters, each with a seed of its own."""
    rng = np.random.default_rng(11)
    made = []
    for seed in range(count):
        prompt = rng.integers(2, 120, rng.integers(1, 40)).tolist()
        params = dict(temperature=temperature, seed=100 + seed)
        if temperature:
            params |= dict(top_k=int(rng.choice([0, 20])), top_p=float(rng.choice([0.7, 1.0])))
        made.append((prompt, params))
    return made


def tokens_together(server: LiveServer, wanted: list[tuple[list[int], dict]]) -> list[list[int]]:
    """The server's answers to all of them at the same time."""
    stopping = pb.Stopping(max_tokens=40, ignore_eos=True)
    with grpc.insecure_channel(server.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        calls = [
            stub.GenerateOnce.future(
                pb.GenerateRequest(
                    tokens=pb.TokenIds(ids=prompt),
                    sampling=pb.Sampling(**params),
                    stopping=stopping,
                )
            )
            for prompt, params in wanted
        ]
        return [list(call.result().sequences[0].token_ids) for call in calls]


def tokens_alone(engine, wanted: list[tuple[list[int], dict]]) -> list[list[int]]:
    """An engine's answers to each of them, one after the other."""
    found = []
    for prompt, params in wanted:
        params = SamplingParams(max_tokens=40, ignore_eos=True, **params)
        found.append(engine.generate([prompt], params)[0].tokens)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_output_does_not_depend_on_concurrent_requests(server, alone, temperature):
    """Greedy, or sampled with seeds."""
    wanted = requests_of_every_kind(count=10, temperature=temperature)
    assert tokens_together(server, wanted) == tokens_alone(alone, wanted)


@pytest.mark.slow
def test_output_does_not_depend_on_preemption(narrow, alone):
    """Requests that were pushed out and came back go on where they were. Greedy only: a sampled one
    has lost the drafts that its seed had met, and draws anew."""
    before = narrow.engine.scheduler.num_preemptions
    wanted = requests_of_every_kind(count=24, temperature=0.0)
    assert tokens_together(narrow, wanted) == tokens_alone(alone, wanted)
    assert narrow.engine.scheduler.num_preemptions > before + 3
    narrow.check_empty()


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
    with grpc.insecure_channel(server.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
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
