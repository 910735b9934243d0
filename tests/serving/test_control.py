"""Updates of weights and pauses: for callers with the admin scope, over HTTP and gRPC."""

import contextlib
import json
import re
import socket
import threading
from pathlib import Path
from typing import Self

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from peagle_jax.checkpoint import incoming, save_head, save_target
from peagle_jax.config import ConfigError
from serving.bearer_tokens import AdminToken, TokenFile
from serving.frontend import State
from serving.protos import peagle_v1_pb2 as pb
from serving.protos import peagle_v1_pb2_grpc
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from tests import tiny
from tests.serving.conftest import EOS_IDS
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

PATHS = ("/v1/weights", "/pause", "/resume")
LONG = dict(prompt=[5, 6, 7], max_tokens=60, temperature=0, ignore_eos=True)


def headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def metadata(token: str) -> list[tuple[str, str]]:
    return [*headers(token).items()]


def save(folder, seed: int, **changes):
    changes = tiny.ONE_LAYER | changes
    save_target(tiny.target(seed, eos_ids=EOS_IDS, **changes), folder, dtype="float32")
    return str(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("first"), 0)


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("second"), 7)


@pytest.fixture(scope="module")
def live(make_engine):
    server = LiveServer(make_engine(), http=True, tokens=(b"user", AdminToken(b"root")))
    yield server
    server.close()


class Client:
    """A client with a token."""

    def __init__(self, address: str, token: str):
        url = f"http://{address}"
        self.http = httpx.Client(base_url=url, headers=headers(token), timeout=LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.http.close()

    def complete(self, **body) -> dict:
        return self.http.post("/v1/completions", json=LONG | body).raise_for_status().json()

    def text(self) -> str:
        return self.complete()["choices"][0]["text"]

    def update(self, folder: str | None = None, **body) -> httpx.Response:
        return self.http.post("/v1/weights", json=dict(folder=folder) | body)


@pytest.fixture
def user(server):
    with Client(server.http_address, "user") as client:
        yield client


@pytest.fixture
def root(server, first):
    with Client(server.http_address, "root") as client:
        yield client
        assert client.update(first, version="0").status_code == 200


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_others_are_refused_before_anything_is_read(server, user):
    text = user.text()
    host, port = server.http_address.split(":")
    for path in PATHS:
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            # The body never comes.
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
            head += "authorization: Bearer user\r\ncontent-type: application/json\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 403 ")
        answer = httpx.post(f"http://{server.http_address}{path}", json={})
        assert answer.status_code == 401
    assert user.text() == text


def test_a_server_without_an_admin_token_refuses_all(server):
    with server.another_http(tokens=()) as address:
        for path in PATHS:
            answer = httpx.post(f"http://{address}{path}", json=dict(folder="/no/such"))
            assert answer.status_code == 403
            assert "scope=admin" in answer.json()["error"]["message"]


def test_control_over_grpc_is_for_admins(channel, first, second, root, user):
    control = peagle_v1_pb2_grpc.ControlStub(channel)
    info = peagle_v1_pb2_grpc.GenerationStub(channel).GetModelInfo
    update = pb.UpdateWeightsRequest(folder=second, version="new", running=pb.RUNNING_FINISH)
    calls = [
        (control.UpdateWeights, update),
        (control.Pause, pb.PauseRequest()),
        (control.Resume, pb.ResumeRequest()),
    ]
    for call, request in calls:
        for token, code in (
            ("user", grpc.StatusCode.PERMISSION_DENIED),
            ("none", grpc.StatusCode.UNAUTHENTICATED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=metadata(token), timeout=LIMIT)
            assert caught.value.code() is code
    before = user.text()
    answer = control.UpdateWeights(update, metadata=metadata("root"), timeout=LIMIT)
    assert answer.version == "new"
    found = info(pb.GetModelInfoRequest(), metadata=metadata("user"), timeout=LIMIT)
    assert found.weights_version == "new"
    assert user.text() != before
    for call, request in calls[1:]:
        call(request, metadata=metadata("root"), timeout=LIMIT)
    update.folder = "/no/such"
    with pytest.raises(grpc.RpcError) as caught:
        control.UpdateWeights(update, metadata=metadata("root"), timeout=LIMIT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_texts_are_those_of_the_new_weights(root, user, first, second, server):
    before = user.complete()
    assert "weights_versions" not in before["usage"]
    answer = root.update(second)
    assert answer.status_code == 200
    version = answer.json()["version"]
    after = user.complete()
    assert after["choices"][0]["text"] != before["choices"][0]["text"]
    assert after["usage"]["weights_versions"] == [version]
    assert user.http.get("/v1/models").json()["data"][0]["weights_version"] == version
    assert f'version="{version}"' in user.http.get("/metrics").text
    assert root.update(first, version="back").json()["version"] == "back"
    again = user.complete()
    assert again["choices"] == before["choices"]
    assert again["usage"]["weights_versions"] == ["back"]


def test_a_gguf_file_is_read_as_its_folder(root, user, second, monkeypatch):
    before = user.text()
    monkeypatch.setattr(incoming, "resolve", lambda text: (Path(second), text))
    assert root.update("model.gguf").status_code == 200
    assert user.text() != before


def test_another_head_changes_drafts_and_no_text(root, user, tmp_path):
    def answer() -> tuple[str, list]:
        (choice,) = user.complete(return_rounds=True)["choices"]
        return choice["text"], [one["drafts"] for one in choice["rounds"]]

    text, drafts = answer()
    head = tiny.head(seed=9, **tiny.HEAD_OF_ONE_LAYER)
    save_head(head, tmp_path / "head", max_position=96, dtype="float32")
    assert root.update(head=str(tmp_path / "head")).json()["version"] == "0"
    after = answer()
    assert after[0] == text
    assert after[1] != drafts


def test_what_does_not_fit_is_named_and_changes_nothing(root, user, tmp_path):
    before = user.complete()
    wide = save(tmp_path / "wide", 1, intermediate_size=64)
    deep = save(tmp_path / "deep", 1, num_layers=2)
    for body, parts in (
        (dict(folder=wide), ["layers.0.mlp.gate_up.weight", "layers.0.mlp.down.weight"]),
        (dict(folder=deep), ["layers.1."]),
        (dict(folder=str(tmp_path / "nothing")), ["nothing"]),
        (dict(head=wide), ["fc.weight"]),
        (dict(folder=wide, running="never"), ["running"]),
        (dict(folder=wide, version="\n"), ["version"]),
        (dict(folder=wide, runing="keep"), ["runing"]),
        ({}, ["folder"]),
    ):
        answer = root.http.post("/v1/weights", json=body)
        assert answer.status_code == 400, body
        for part in parts:
            assert part in answer.json()["error"]["message"], body
    assert user.complete()["choices"] == before["choices"]


class Streams:
    """Streams that threads read; `ended` has finish reason, tokens and usage of each."""

    def __init__(self, client: Client, count: int):
        self.ended: list[tuple[str, int, dict]] = []
        self.tokens = [0] * count
        self._client = client
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, place: int) -> None:
        options = dict(stream=True, return_token_ids=True, stream_options=dict(include_usage=True))
        body, reason = LONG | options | dict(prompt=[5 + place, 6]), None
        with self._client.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                for choice in chunk["choices"]:
                    self.tokens[place] += len(choice["token_ids"])
                    reason = choice["finish_reason"] or reason
        self.ended.append((reason, self.tokens[place], chunk["usage"]))

    def join(self) -> list[tuple[str, int, dict]]:
        for thread in self._threads:
            thread.join(LIMIT)
        return self.ended


@contextlib.contextmanager
def updating(client: Client, folder: str, **body):
    """Updates in a thread; the block begins before the answer."""
    answers = []
    run = lambda: answers.append(client.update(folder, **body))
    thread = threading.Thread(target=run)
    thread.start()
    yield answers
    thread.join(LIMIT)
    assert answers[0].status_code == 200


@pytest.mark.parametrize("running", ["keep", "finish", "abort"])
def test_requests_that_run_are_kept_finished_or_aborted(server, root, user, second, running):
    generated = server.frontend.load.num_tokens
    with server.paced() as pace:
        streams = Streams(user, 3)
        eventually(lambda: pace.release(1) or all(streams.tokens), "all streams have begun")
        with updating(root, second, version="second", running=running):
            # The engine's thread waits for a round: the update comes between two of them.
            eventually(lambda: pace.release(1) or len(streams.ended) == 3, every=0.02)
    for reason, count, usage in streams.join():
        if running == "abort":
            assert reason == "abort"
            assert usage["completion_tokens"] < 60
            continue
        assert (reason, count) == ("length", 60)
        versions = usage.get("weights_versions", ["0"])
        assert versions == (["0", "second"] if running == "keep" else ["0"])
    assert server.frontend.load.num_tokens == generated + sum(streams.tokens)
    assert user.complete()["usage"]["weights_versions"] == ["second"]


def hold(server, pace) -> None:
    """Returns once an order waits for the requests that run."""
    # The engine's thread waits for a round, so the order stays in its mail.
    eventually(lambda: server.frontend._worker._mail.qsize(), "the weights are read")
    is_held = lambda: server.engine.scheduler.is_draining
    eventually(lambda: pace.release(1) or is_held(), "the order waits", every=0.05)


def test_a_client_that_leaves_is_not_awaited(server, root, user, second):
    with server.paced() as pace, contextlib.ExitStack() as stack:
        body = LONG | dict(stream=True, return_token_ids=True)
        pace.release(2)
        with user.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: its end would close the connection
            next(lines)
            order = updating(root, second, version="second", running="finish")
            answers = stack.enter_context(order)
            hold(server, pace)
            streams = Streams(user, 1)
            eventually(lambda: server.frontend.num_open == 2, "the next request has come")
        eventually(lambda: server.frontend.num_open == 1, "the client has left")
        assert answers == streams.ended == []
        pace.release(2)
        eventually(lambda: answers, "the weights are replaced")
    ((reason, count, usage),) = streams.join()
    assert (reason, count) == ("length", 60)
    assert usage["weights_versions"] == ["second"]


def test_a_pause_ends_an_order_that_waits(server, root, user, second):
    with server.paced() as pace:
        streams = Streams(user, 1)
        pace.release(2)
        eventually(lambda: all(streams.tokens), "the stream has begun")
        answers = []
        order = lambda: answers.append(root.update(second, running="finish"))
        threads = [threading.Thread(target=order)]
        threads += [threading.Thread(target=root.http.post, args=("/pause",))]
        threads[0].start()
        hold(server, pace)
        threads[1].start()
        eventually(lambda: pace.release(1) or answers, "the order has ended", every=0.05)
        for thread in threads:
            thread.join(LIMIT)
        assert "paused" in answers[0].json()["error"]["message"]
        assert root.http.post("/resume").status_code == 200
    assert streams.join()[0][:2] == ("length", 60)


def test_requests_are_served_while_weights_are_read(root, user, second, monkeypatch):
    may_read, read = threading.Event(), incoming.load_like

    def late(*args, **rules):
        assert may_read.wait(LIMIT)
        return read(*args, **rules)

    monkeypatch.setattr(incoming, "load_like", late)
    with updating(root, second, version="late") as answers:
        assert user.complete()["choices"][0]["finish_reason"] == "length"
        assert answers == []
        may_read.set()
    assert user.complete()["usage"]["weights_versions"] == ["late"]


def test_a_lack_of_memory_changes_nothing(server, root, user, second, monkeypatch):
    text = user.text()
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def fail(*args, **rules):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "update_weights", fail)
        answer = root.update(second)
    assert answer.status_code == 500
    assert "out of memory" in answer.json()["error"]["message"]
    assert user.text() == text


def reported(server, user) -> set[bool]:
    """Whether the server is paused, as each place says it. Probes find it healthy."""
    health = user.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "serving")
    with grpc.insecure_channel(server.address) as channel:
        stats = GenerationStub(channel).GetStats(pb.GetStatsRequest(), metadata=metadata("user"))
        checked = HealthStub(channel).Check(HealthCheckRequest())
    assert checked.status == HealthCheckResponse.SERVING
    (gauge,) = re.findall(r"^peagle:paused{.*} (.*)$", user.http.get("/metrics").text, re.M)
    return {health.json()["paused"], stats.is_paused, float(gauge) == 1}


def test_a_pause_holds_requests_until_it_ends(server, root, user):
    text = user.text()
    answer = root.http.post("/pause")
    assert answer.json()["paused"] is True
    streams = Streams(user, 1)
    eventually(lambda: server.frontend.load.num_waiting == 1, "the request waits")
    assert root.http.post("/pause").status_code == 200
    assert root.update(running="finish", head="/no/such").status_code == 400
    assert streams.tokens == [0]
    assert reported(server, user) == {True}
    assert root.http.post("/resume").json()["paused"] is False
    assert reported(server, user) == {False}
    assert streams.join()[0][:2] == ("length", 60)
    assert user.text() == text


def test_requests_of_a_paused_server_end_when_it_drains(make_engine):
    live = LiveServer(make_engine(), http=True, tokens=(AdminToken(b"root"),))
    with Client(live.http_address, "root") as root:
        assert root.http.post("/pause").status_code == 200
        streams = Streams(root, 1)
        eventually(lambda: live.frontend.load.num_waiting == 1, "the request waits")
        assert live.run(live.frontend.drain(LIMIT))
        assert streams.join()[0][:2] == ("length", 60)
    live.close()


def test_an_update_that_fails_half_way_ends_the_engine(make_engine, second, monkeypatch):
    live = LiveServer(make_engine(), http=True, tokens=(AdminToken(b"root"),))

    def fail(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(live.engine.programs, "replace_weights", fail)
    with Client(live.http_address, "root") as root:
        assert root.update(second).status_code == 503
    assert live.frontend.state is State.DEAD
    live.close()


def test_the_scope_of_a_token_stands_behind_it(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("# tokens\nuser\nroot  scope=admin\n")
    tokens = TokenFile(file)
    assert [*tokens] == [b"user", b"root"]
    assert [isinstance(one, AdminToken) for one in tokens] == [False, True]
    file.write_text("root scope=king\n")
    with pytest.raises(ConfigError, match="scope=king is unknown"):
        TokenFile(file)
