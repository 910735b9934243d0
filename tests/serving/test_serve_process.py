"""`peagle-serve` as a process: readiness, shutdown and exit codes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.served import Served
from serving.app import END_SECONDS
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests.cli import conftest
from tests.serving.processes import Processes, is_running
from tests.waiting import LIMIT, eventually

folders, broken = conftest.folders, conftest.broken
Status = grpc.StatusCode
STATUSES = health_pb2.HealthCheckResponse
LONG = pb.Stopping(max_tokens=150, ignore_eos=True)
SHORT = pb.Stopping(max_tokens=3, ignore_eos=True)
NUM_STREAMS = 24  # on four slots: most of them wait when the signal comes


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """One cache of compiled programs, and no options from the tests' environment."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PEAGLE_")}
    return mine | {"HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def serve(folders, environment, tmp_path):
    """Starts a server of the tiny model; options are added."""
    servers: list[Served] = []

    def start(*options: str) -> Served:
        model = [item for item in folders.options() if item != "--no-cache"]
        sizes = ["--max-model-len", "256", "--max-num-seqs", "4", "--prefill-chunk", "16"]
        drafts = ["--num-speculative-tokens", "3"]
        log = tmp_path / f"serve-{len(servers)}.log"
        arguments = [*model, *sizes, *drafts, *options]
        servers.append(Served(arguments, log=log, environment=environment))
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


def read(call, found: list) -> None:
    """Reads a stream to its end: how many tokens, and the status."""
    count = 0
    try:
        for delta in call:
            count += len(delta.token_ids)
    except grpc.RpcError:
        pass
    found.append((call.code(), count))


class Readers:
    """Streams that threads read; `found` has one (code, tokens) per ended stream."""

    def __init__(self, stub: peagle_v1_pb2_grpc.GenerationStub, count: int):
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]), stopping=LONG)
        self.found: list[tuple[Status, int]] = []
        calls = [stub.Generate(request) for _ in range(count)]
        self._threads = [
            threading.Thread(target=read, args=(call, self.found), daemon=True) for call in calls
        ]
        for call in calls:
            call.initial_metadata()  # comes when the request is accepted
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()


def wait_until_open(stub: peagle_v1_pb2_grpc.GenerationStub, count: int) -> None:
    def num_open() -> int:
        stats = stub.GetStats(pb.GetStatsRequest())
        return stats.num_running + stats.num_waiting

    eventually(lambda: num_open() >= count, f"{count} requests run or wait")


def refused(stub: peagle_v1_pb2_grpc.GenerationStub) -> grpc.Future:
    """Sends short requests until one is refused."""
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]), stopping=pb.Stopping(max_tokens=1))
    for _ in range(1000):
        call = stub.GenerateOnce.future(request)
        if call.code() is not Status.OK:
            return call
    raise AssertionError("the server takes everything")


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_drain(serve, second, code):
    server = serve("--drain-seconds", "3600")
    with grpc.insecure_channel(server.wait()) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        readers = Readers(stub, NUM_STREAMS)
        wait_until_open(stub, NUM_STREAMS // 2)
        server.process.terminate()
        assert refused(stub).code() is Status.UNAVAILABLE
        server.process.send_signal(second)
        readers.wait()
    codes = {code for code, _ in readers.found}
    assert codes <= {Status.OK, Status.UNAVAILABLE}
    assert Status.UNAVAILABLE in codes
    assert server.process.wait(60) == code
    assert "Traceback" not in server.text()


@pytest.mark.slow
def test_a_hostile_chat_template_delays_neither_health_nor_the_end(serve, broken):
    (broken.target / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    server = serve("--model", str(broken.target), "--drain-seconds", "0.5")
    with grpc.insecure_channel(server.wait()) as channel:
        talk = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        call = stub.GenerateOnce.future(pb.GenerateRequest(chat=talk))
        eventually(lambda: Processes(server).renderer, "the chat is rendered")
        found = Processes(server)
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == STATUSES.SERVING
        begun = time.monotonic()
        server.process.terminate()
        assert call.code() in (Status.UNAVAILABLE, Status.INVALID_ARGUMENT)
        server.process.wait(LIMIT)
        assert time.monotonic() - begun < 0.5 + END_SECONDS + 1.0
    found.wait_until_gone()
    eventually(lambda: not is_running(found.renderer))


@pytest.mark.slow
@pytest.mark.parametrize("output", ["full", "closed"])
def test_a_server_needs_nobody_who_reads_its_output(folders, environment, output):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [*folders.options(), "--max-model-len", "64", "--port", str(port)]
    arguments += ["--http-port", "-1"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if output == "closed" else []
    command = [*closed, sys.executable, "-m", "serving", *arguments, "--drain-seconds", "1"]
    process = subprocess.Popen(command, env=environment, stdout=writer, stderr=writer)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]), stopping=SHORT)
            stub = peagle_v1_pb2_grpc.GenerationStub(channel)

            def serves() -> bool:
                assert process.poll() is None
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.GenerateOnce(request, wait_for_ready=True)
                    return bool(answer.usage.completion_tokens)
                return False

            eventually(serves, "the server serves")
        process.terminate()
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def test_a_process_that_hangs_ends_in_time_with_its_children():
    code = (
        "import threading; from serving.engine_child import EngineChild; child = EngineChild();"
        "child.end_within(0.5); print(child._process.pid, flush=True); threading.Event().wait()"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (made.returncode, "did not end by itself" in made.stderr) == (1, True)
    assert not is_running(int(made.stdout))


@pytest.mark.slow
def test_sighup_reads_files_again_and_ends_no_request(serve, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("first\n")
    server = serve("--auth-token-file", str(tokens))
    wait_for_log(server, "no-cache: ")
    server.process.send_signal(signal.SIGHUP)  # while it loads
    with grpc.insecure_channel(server.wait()) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        info = lambda token: stub.GetStats(
            pb.GetStatsRequest(), metadata=[("authorization", f"Bearer {token}")]
        )
        for content, message in (
            ("# none\n", "cannot be read again, the old ones stay in use"),
            ("second\n", "were read again"),
        ):
            tokens.write_text(content)
            server.process.send_signal(signal.SIGHUP)
            wait_for_log(server, message)
        info("second")
        with pytest.raises(grpc.RpcError):
            info("first")
    assert server.stop(60.0) == 0


def wait_for_log(server: Served, message: str) -> None:
    eventually(lambda: message in server.text(), f"{message!r} in the log")


@pytest.mark.slow
def test_health_follows_the_life_of_the_server(serve):
    server = serve()
    with grpc.insecure_channel(server.wait_for_port()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        names = ["", "peagle.v1.Generation"]
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
        # It has just begun to listen, and compiles.
        for name in names:
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == STATUSES.NOT_SERVING
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError, match="starting") as caught:
            stub.GenerateOnce(pb.GenerateRequest(tokens=pb.TokenIds(ids=[5])))
        assert caught.value.code() is Status.UNAVAILABLE
        for watch in watches:
            assert next(watch).status == STATUSES.NOT_SERVING
            assert next(watch).status == STATUSES.SERVING
        readers = Readers(stub, 4)
        server.process.terminate()
        assert [next(watch).status for watch in watches] == [STATUSES.NOT_SERVING] * 2
        readers.wait()
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() in (Status.NOT_FOUND, Status.UNAVAILABLE)
    assert server.process.wait(LIMIT) == 0


@pytest.mark.exhaustive
def test_the_embedded_model_is_soon_served(environment, tmp_path):
    """On two idle cores after 9 s, or 5 s once programs lie in the cache."""
    environment = {name: value for name, value in environment.items() if name != "XLA_FLAGS"}
    for name in ("cold", "warm"):
        with Served([], log=Path(tmp_path, name), environment=environment) as server:
            address = server.wait(LIMIT)
            with grpc.insecure_channel(address) as channel:
                stub = peagle_v1_pb2_grpc.GenerationStub(channel)
                request = pb.GenerateRequest(text="def", stopping=pb.Stopping(max_tokens=4))
                assert stub.GenerateOnce(request).usage.completion_tokens > 0
            assert server.stop(LIMIT) == 0
