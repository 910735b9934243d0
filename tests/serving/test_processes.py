"""`peagle-serve` as processes: the texts of the target, readiness, signals, one end for all."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.served import Served, processes
from peagle_jax.checkpoint import load_target, save_target
from serving.app import END_SECONDS
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from tests import tiny
from tests.cli import conftest
from tests.serving.processes import Processes, connections, is_running, stopped
from tests.waiting import LIMIT, eventually

folders, broken = conftest.folders, conftest.broken
Status = grpc.StatusCode
STATUSES = health_pb2.HealthCheckResponse
SIZES = ("--max-model-len", "256", "--max-num-seqs", "2", "--prefill-chunk", "16", "-K", "3")
LONG = pb.Stopping(max_tokens=200, ignore_eos=True)
NUM_CONNECTIONS = 16


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """One cache of compiled programs, and no options from the tests' environment."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PEAGLE_")}
    return mine | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def start(folders, environment, tmp_path_factory):
    """Starts a server of the tiny model; options are added."""
    servers: list[Served] = []

    def start(*options: str, prefix: tuple[str, ...] = (), wait: bool = True) -> Served:
        model = [item for item in folders.options() if item != "--no-cache"]
        log = tmp_path_factory.mktemp("logs") / "log"
        arguments = [*model, *SIZES, "--http-port", "0", *options]
        servers.append(Served(arguments, log=log, environment=environment, prefix=prefix))
        if wait:
            servers[-1].wait(LIMIT)
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture(scope="module")
def two(start) -> Served:
    """A server; tests leave it empty, and the last one kills it."""
    return start("--max-waiting", "64")


def stream(stub, ids=(5, 6, 7), stopping=LONG, **fields):
    return stub.Generate(
        pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), stopping=stopping, **fields)
    )


def end_of(call) -> tuple[Status, str, int]:
    """Status, details and tokens of a stream that is read to its end."""
    count = 0
    try:
        for delta in call:
            count += len(delta.token_ids)
    except grpc.RpcError:
        pass
    return call.code(), call.details(), count


def ends_of(calls) -> list[tuple[Status, str, int]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(end_of, calls))


def begun(call):
    """The stream, once its first token is there."""
    next(call)
    return call


def test_only_the_process_of_the_engine_has_loaded_jax(two):
    found = Processes(two)
    has_jax = lambda pid: "jaxlib" in Path(f"/proc/{pid}/maps").read_text()
    assert [has_jax(pid) for pid in found.all] == [False, True]


def test_texts_of_many_clients_are_those_of_the_target(two, folders):
    """Greedy, with K by load, half of them over HTTP."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 60, rng.integers(1, 60)).tolist() for _ in range(32)]
    expected = tiny.greedy(load_target(folders.target, dtype="float32"), prompts, 40)
    stopping = pb.Stopping(max_tokens=40, ignore_eos=True)

    def over_http(prompt: list[int]) -> list[int]:
        body = dict(
            prompt=prompt, max_tokens=40, ignore_eos=True, temperature=0, return_token_ids=True
        )
        answer = httpx.post(f"http://{two.http_address}/v1/completions", json=body, timeout=LIMIT)
        return answer.json()["choices"][0]["token_ids"]

    with connections(two.address, NUM_CONNECTIONS) as stubs, ThreadPoolExecutor(32) as pool:
        calls = [stream(stub, p, stopping) for stub, p in zip(stubs, prompts[:16], strict=True)]
        read = lambda call: [token for delta in call for token in delta.token_ids]
        found = [*pool.map(read, calls), *pool.map(over_http, prompts[16:])]
    assert found == expected


@pytest.mark.slow
def test_calls_that_are_cancelled_leave_no_memory(two):
    """Elsewhere `grpc.aio` has leaked for each cancelled stream."""
    resident = []

    async def cancel(count: int) -> None:
        async with grpc.aio.insecure_channel(two.address) as channel:
            stub = peagle_v1_pb2_grpc.GenerationStub(channel)
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]), stopping=LONG)

            async def client() -> None:
                for _ in range(count // 4):
                    call = stub.Generate(request)
                    assert await call.read()
                    call.cancel()

            await asyncio.gather(*(client() for _ in range(4)))

    for count in (1000, 4000):
        asyncio.run(cancel(count))
        resident.append(processes(two.process.pid)[two.process.pid].resident_bytes)
    assert resident[1] - resident[0] < 500 * 4000, resident


@pytest.mark.slow
@pytest.mark.parametrize("which", ["engine", "main"])
def test_a_stop_longer_than_a_round_may_take_ends_no_request(start, which):
    server = start("--round-seconds", "4", "--drain-seconds", "1")
    with connections(server.address, 1) as (stub,):
        call = stream(stub)
        first = len(next(call).token_ids)  # a message may carry more than one
        with stopped(getattr(Processes(server), which)):
            until = time.monotonic() + 6.0
            eventually(lambda: time.monotonic() > until, "the process was stopped for longer")
        assert end_of(call) == (Status.OK, "", 200 - first)
        assert end_of(stream(stub))[0] is Status.OK
    assert server.stop(LIMIT) == 0


@pytest.mark.slow
def test_an_engine_that_never_reads_the_order_to_end_delays_the_end_by_seconds(start):
    server = start("--drain-seconds", "0.5")
    found = Processes(server)
    with stopped(found.engine):
        begun_at = time.monotonic()
        assert server.stop(LIMIT) == 0
        assert time.monotonic() - begun_at < 0.5 + END_SECONDS + 1.0
        found.wait_until_gone()


def _may_unshare() -> bool:
    with contextlib.suppress(OSError):
        made = subprocess.run(["unshare", "-pf", "true"], capture_output=True, check=False)
        return made.returncode == 0
    return False


@pytest.mark.slow
@pytest.mark.skipif(not _may_unshare(), reason="needs a pid namespace of its own")
@pytest.mark.parametrize("end", ["drain", "loss"])
def test_process_1_of_a_container_drains_and_sees_the_end_of_a_child(start, end):
    """Process 1 gets no signal that it does not handle, and inherits the orphans of all others."""
    server = start("--drain-seconds", "30", prefix=("unshare", "-pf", "--kill-child"))
    pid = server.process.pid
    first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    with connections(server.address, 1) as (stub,):
        call = begun(stream(stub))
        found = Processes(SimpleNamespace(process=SimpleNamespace(pid=first)))
        if end == "drain":
            os.kill(first, signal.SIGTERM)
        else:
            os.kill(found.engine, signal.SIGKILL)
        assert end_of(call)[0] is (Status.OK if end == "drain" else Status.INTERNAL)
    assert server.process.wait(LIMIT) == (0 if end == "drain" else 1)
    found.wait_until_gone()


def test_the_death_of_the_engine_ends_the_server(two):
    server, found = two, Processes(two)
    with connections(server.address, NUM_CONNECTIONS) as stubs:
        calls = [begun(stream(stub)) for stub in stubs[:2]] + [stream(stub) for stub in stubs[2:]]
        os.kill(found.engine, signal.SIGKILL)
        ends = ends_of(calls)
    assert server.process.wait(LIMIT) == 1
    found.wait_until_gone()
    assert {code for code, *_ in ends} - {Status.OK} == {Status.INTERNAL}
    assert any("the engine died (process ended)" in details for _, details, _ in ends)
    assert "the engine's process ended by signal SIGKILL; the server ends" in server.text()
    assert "Traceback" not in server.text()


@pytest.mark.slow
def test_no_process_outlives_the_first(start):
    server = start()
    found = Processes(server)
    os.kill(found.main, signal.SIGKILL)
    server.process.wait(LIMIT)
    found.wait_until_gone()
    assert "the first process of the server has ended, and the engine's process ends too" in (
        server.text()
    )


@pytest.mark.slow
def test_an_interrupt_of_all_processes_drains_once_and_loses_no_request(start):
    """As Ctrl-C at a terminal sends it."""
    server = start()
    found = Processes(server)
    with connections(server.address, 4) as stubs:
        calls = [begun(stream(stub)) for stub in stubs]
        for pid in found.all:
            os.kill(pid, signal.SIGINT)
        ends = ends_of(calls)
    assert {code for code, *_ in ends} == {Status.OK}
    assert server.process.wait(LIMIT) == 0
    found.wait_until_gone()


@pytest.mark.slow
def test_children_import_nothing_from_the_folder_that_the_server_starts_in(tmp_path):
    trap = tmp_path / "serving" / "__init__.py"
    trap.parent.mkdir()
    trap.write_text("from pathlib import Path; Path(__file__).with_name('was-run').touch()")
    options = ["--port", "0", "--http-port", "-1", "--model", "missing"]
    code = f"import sys; from serving.__main__ import main; sys.exit(main({options}))"
    run = dict(capture_output=True, text=True, timeout=LIMIT, check=False, cwd=tmp_path)
    run["env"] = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    made = subprocess.run([sys.executable, "-P", "-c", code], **run)
    assert (made.returncode, "missing" in made.stderr) == (2, True), made.stderr
    assert [one.name for one in trap.parent.iterdir()] == ["__init__.py"]


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
def test_a_second_signal_ends_the_drain(start, second, code):
    server = start("--drain-seconds", "3600")
    with connections(server.address, 1) as (stub,), ThreadPoolExecutor(24) as pool:
        calls = [stream(stub) for _ in range(24)]  # most of them wait when the signal comes
        for call in calls:
            call.initial_metadata()  # comes when the request is accepted
        ends = [pool.submit(end_of, call) for call in calls]
        server.process.terminate()
        assert refused(stub).code() is Status.UNAVAILABLE
        server.process.send_signal(second)
        codes = {end.result(LIMIT)[0] for end in ends}
    assert codes <= {Status.OK, Status.UNAVAILABLE}
    assert Status.UNAVAILABLE in codes
    assert server.process.wait(60) == code
    assert "Traceback" not in server.text()


@pytest.mark.slow
def test_a_hostile_chat_template_delays_neither_health_nor_the_end(start, broken):
    (broken.target / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    server = start("--model", str(broken.target), "--drain-seconds", "0.5")
    with connections(server.address, 1) as (stub,), grpc.insecure_channel(server.address) as over:
        talk = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")])
        call = stub.GenerateOnce.future(pb.GenerateRequest(chat=talk))
        eventually(lambda: Processes(server).renderer, "the chat is rendered")
        found = Processes(server)
        health = health_pb2_grpc.HealthStub(over)
        assert health.Check(health_pb2.HealthCheckRequest()).status == STATUSES.SERVING
        begun_at = time.monotonic()
        server.process.terminate()
        assert call.code() in (Status.UNAVAILABLE, Status.INVALID_ARGUMENT)
        server.process.wait(LIMIT)
        assert time.monotonic() - begun_at < 0.5 + END_SECONDS + 1.0
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
    model = [item for item in folders.options() if item != "--no-cache"]
    arguments = [*model, *SIZES, "--port", str(port), "--http-port", "-1"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if output == "closed" else []
    command = [*closed, sys.executable, "-m", "serving", *arguments, "--drain-seconds", "1"]
    process = subprocess.Popen(command, env=environment, stdout=writer, stderr=writer)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stopping = pb.Stopping(max_tokens=3, ignore_eos=True)
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5]), stopping=stopping)
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


def wait_for_log(server: Served, message: str) -> None:
    eventually(lambda: message in server.text(), f"{message!r} in the log")


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


@pytest.mark.slow
def test_sighup_reads_files_again_and_ends_no_request(start, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("first\n")
    server = start("--auth-token-file", str(tokens), wait=False)
    wait_for_log(server, "no-cache: ")
    server.process.send_signal(signal.SIGHUP)  # while it loads
    server.wait(LIMIT)
    with connections(server.address, 1) as (stub,):
        for content, message in (
            ("# none\n", "cannot be read again, the old ones stay in use"),
            ("second\n", "were read again"),
        ):
            tokens.write_text(content)
            server.process.send_signal(signal.SIGHUP)
            wait_for_log(server, message)
        stats = lambda token: stub.GetStats(pb.GetStatsRequest(), metadata=bearer(token))
        stats("second")
        with pytest.raises(grpc.RpcError):
            stats("first")
    assert server.stop(60.0) == 0


@pytest.mark.slow
def test_an_engine_in_its_process_takes_other_weights_under_load(start, folders, tmp_path):
    sizes = dict(vocab_size=conftest.VOCAB, max_position=conftest.MAX_POSITION)
    for name, layers in (("other", 2), ("wrong", 1)):
        save_target(tiny.target(3, num_layers=layers, **sizes), tmp_path / name, dtype="float32")
    (tmp_path / "tokens").write_text("root scope=admin\n")
    server, root = start("--auth-token-file", str(tmp_path / "tokens")), bearer("root")
    with grpc.insecure_channel(server.address) as channel:
        stub = peagle_v1_pb2_grpc.GenerationStub(channel)
        control = peagle_v1_pb2_grpc.ControlStub(channel)

        def update(folder: Path) -> str:
            request = pb.UpdateWeightsRequest(folder=str(folder))
            return control.UpdateWeights(request, metadata=root, timeout=LIMIT).version

        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]), stopping=LONG)

        def answer() -> tuple[list[int], list[str]]:
            found = stub.GenerateOnce(request, metadata=root, timeout=LIMIT)
            return list(found.sequences[0].token_ids), list(found.usage.weights_versions)

        text, versions = answer()
        assert versions == ["0"]
        with pytest.raises(grpc.RpcError, match=r"layers\.1\.") as caught:
            update(tmp_path / "wrong")
        assert caught.value.code() is Status.INVALID_ARGUMENT
        assert answer() == (text, ["0"])
        streams = [begun(stub.Generate(request, metadata=root)) for _ in range(4)]
        assert update(tmp_path / "other") == "1"
        assert {code for code, *_ in ends_of(streams)} == {Status.OK}
        changed, versions = answer()
        assert versions == ["1"]
        assert changed != text
        assert update(folders.target) == "2"
        assert answer() == (text, ["2"])
    assert server.stop(60.0) == 0


@pytest.mark.slow
def test_health_follows_the_life_of_the_server(start):
    server = start(wait=False)
    address = server.wait_for_port()
    with connections(address, 1) as (stub,), grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asks = [health_pb2.HealthCheckRequest(service=x) for x in ("", "peagle.v1.Generation")]
        watches = [health.Watch(ask) for ask in asks]
        # It has just begun to listen, and compiles.
        assert [health.Check(ask).status for ask in asks] == [STATUSES.NOT_SERVING] * 2
        with pytest.raises(grpc.RpcError, match="starting") as caught:
            stub.GenerateOnce(pb.GenerateRequest(tokens=pb.TokenIds(ids=[5])))
        assert caught.value.code() is Status.UNAVAILABLE
        for watch in watches:
            assert next(watch).status == STATUSES.NOT_SERVING
            assert next(watch).status == STATUSES.SERVING
        calls = [begun(stream(stub)) for _ in range(4)]
        server.process.terminate()
        assert [next(watch).status for watch in watches] == [STATUSES.NOT_SERVING] * 2
        assert {code for code, *_ in ends_of(calls)} == {Status.OK}
    assert server.process.wait(LIMIT) == 0


@pytest.mark.exhaustive
def test_the_embedded_model_is_soon_served(environment, tmp_path):
    """On two idle cores after 9 s, or 5 s once programs lie in the cache."""
    environment = {name: value for name, value in environment.items() if name != "XLA_FLAGS"}
    for name in ("cold", "warm"):
        with Served([], log=Path(tmp_path, name), environment=environment) as server:
            address = server.wait(LIMIT)
            with connections(address, 1) as (stub,):
                request = pb.GenerateRequest(text="def", stopping=pb.Stopping(max_tokens=4))
                assert stub.GenerateOnce(request).usage.completion_tokens > 0
            assert server.stop(LIMIT) == 0


MOST_SECONDS = 0.02
WATCH = """
import gc, os, pathlib, sys, threading, time

folder = pathlib.Path(os.environ["COLLECTIONS"])

def watch():
    # Hundreds are frozen at the start.
    while not (folder / "collect").exists() or gc.get_freeze_count() < 10_000:
        time.sleep(0.01)
    start = time.thread_time()
    gc.collect()
    seconds, name = time.thread_time() - start, f"{os.getpid()}.seconds"
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / name).write_text(f"{seconds} {gc.isenabled()} {len(sys.modules)}")
    os.replace(folder / "part" / name, folder / name)

if any("serving" in argument for argument in sys.orig_argv):
    threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.slow
def test_a_full_collection_is_short_in_every_process_while_requests_run(environment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    mine = environment | {"COLLECTIONS": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    options = ["--max-num-seqs", "2", "--max-model-len", "512"]
    made = Served(options, log=tmp_path / "log", environment=mine)
    with made as server, connections(server.wait(), 1) as (stub,):
        calls = [begun(stream(stub)) for _ in range(2)]
        (tmp_path / "collect").touch()
        eventually(lambda: len([*tmp_path.glob("*.seconds")]) == 2, "both processes collected")
        assert all(count > 0 for *_, count in ends_of(calls))
    found = [file.read_text().split() for file in tmp_path.glob("*.seconds")]
    for seconds, is_enabled, modules in found:
        assert is_enabled == "True"
        assert int(modules) > 100
        assert float(seconds) < MOST_SECONDS, found
