"""The stream between hosts: which processes may join, and that calls arrive unchanged."""

import queue
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from peagle_jax.config import ConfigError
from peagle_jax.engine.device.device_calls import (
    PREFILL,
    Compile,
    CopyRings,
    GreedyRound,
    Run,
    WriteControls,
)
from peagle_jax.engine.host.calls import RoundShape
from serving import hosts
from serving.hosts import Fate, identity
from serving.rpc.credentials import channel_credentials, server_credentials
from serving.rpc.device_calls import from_message, to_message
from serving.rpc.follower import LeaderStream
from serving.rpc.handshake import wait_for_leader
from serving.rpc.leader import Leader
from serving.rpc.several_hosts import failures_end_all
from serving.settings import Settings
from serving.tls import Certificates, Pems, client_pems
from tests.serving.certificates import authority, signed
from tests.waiting import LIMIT

SHAPE = RoundShape(4, 3)
ARRAY = np.array([0, -1, 2**31 - 1], np.int32)
CALLS = [
    Compile((PREFILL, SHAPE, GreedyRound(SHAPE))),
    Run(PREFILL, ARRAY, ARRAY[:1]),
    Run(GreedyRound(SHAPE), ARRAY, None),
    Run(SHAPE, None, None),
    WriteControls(ARRAY),
    CopyRings(2, 5),
]
MINE = {"version": "1", "num_draft": "7"}


def as_lists(call) -> list:
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in (type(call), *call)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_survives_its_message(call):
    message = to_message(call, 9)
    found = from_message(type(message).FromString(message.SerializeToString()))
    assert message.number == 9
    assert as_lists(found) == as_lists(call)


class Process:
    """Stands for a process that ends: its connection closes, and the thread that ends it stops for good."""

    def __init__(self):
        self.codes: queue.Queue[int] = queue.Queue()
        self.close = lambda: None

    def leave(self, code: int) -> None:
        self.codes.put(code)
        self.close()
        threading.Event().wait()


@pytest.fixture
def listen():
    """Starts leaders of two hosts with a token, and says where they listen."""
    started = []

    def listen(certificates: Certificates | None = None) -> SimpleNamespace:
        process = Process()
        credentials = None if certificates is None else server_credentials(certificates)
        rules = dict(seconds=60.0, fate=Fate(0, process.leave), credentials=credentials)
        one = Leader(2, MINE, tokens=[b"secret"], **rules)
        started.append(one)
        port = one.start("127.0.0.1", 0)
        return SimpleNamespace(leader=one, address=f"127.0.0.1:{port}", process=process)

    yield listen
    for one in started:
        one.close()


@pytest.fixture
def leader(listen):
    return listen()


def join(
    leader, host=1, token=b"secret", identity=MINE, credentials=None
) -> tuple[LeaderStream, Process]:
    process = Process()
    rules = dict(token=token, seconds=60.0, fate=Fate(host, process.leave), credentials=credentials)
    return LeaderStream(host, leader.address, identity, **rules), process


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Two authorities, and certificates of both for this machine."""
    folder = tmp_path_factory.mktemp("pki")
    ca, other = authority(folder, "ca"), authority(folder, "other")
    return dict(
        ca=ca, other=other, host=signed(folder, "host", ca), stranger=signed(folder, "stranger", other),
    )  # fmt: skip


def listener(pki, certificate: str | None, ca: str | None) -> Certificates | None:
    if certificate is None:
        return None
    return Certificates(
        pki[certificate].cert, pki[certificate].key, None if ca is None else pki[ca].cert
    )


def caller(pki, certificate: str | None, ca: str | None) -> Pems | None:
    if ca is None:
        return None
    own = pki[certificate] if certificate else None
    return client_pems(pki[ca].cert, *([] if own is None else [own.cert, own.key]))


@pytest.mark.parametrize(
    ("leads", "follows"),
    [
        pytest.param(("host", "ca"), ("host", "ca"), id="certificates on both sides"),
        pytest.param(("host", None), (None, "ca"), id="a token over TLS"),
        pytest.param((None, None), (None, None), id="without TLS"),
    ],
)
def test_hosts_with_the_right_certificates_connect(listen, pki, leads, follows):
    leader, pems = listen(listener(pki, *leads)), caller(pki, *follows)
    wait_for_leader(leader.address, None if pems is None else pems.context, LIMIT)
    credentials = None if pems is None else channel_credentials(pems)
    with pytest.raises(ConfigError, match="token is not known"):
        join(leader, token=b"other", credentials=credentials)[0].join(LIMIT)
    stream, _ = join(leader, credentials=credentials)
    joined = queue.Queue()
    threading.Thread(target=lambda: joined.put(stream.join(LIMIT)), daemon=True).start()
    leader.leader.wait_for_hosts(LIMIT)
    leader.leader.welcome("there:1")
    assert joined.get(timeout=LIMIT) == "there:1"


@pytest.mark.parametrize(
    ("leads", "follows", "reason"),
    [
        (("host", "ca"), (None, None), "uses TLS: give hosts-tls-ca"),
        (("host", None), (None, None), "uses TLS: give hosts-tls-ca"),
        (("host", "ca"), (None, "ca"), "does not accept the certificate of this host"),
        (("host", "ca"), ("stranger", "ca"), "does not accept the certificate of this host"),
        (("stranger", "ca"), ("host", "ca"), "that hosts-tls-ca does not verify"),
        ((None, None), ("host", "ca"), "uses no TLS"),
    ],
)
def test_hosts_that_differ_in_tls_are_told_apart_at_once(listen, pki, leads, follows, reason):
    leader, pems = listen(listener(pki, *leads)), caller(pki, *follows)
    with pytest.raises(ConfigError, match=reason):
        wait_for_leader(leader.address, None if pems is None else pems.context, LIMIT)


def test_a_leader_that_does_not_listen_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        ConfigError, match=f"host 0 at 127.0.0.1:{port} has not answered within 0 s"
    ):
        wait_for_leader(f"127.0.0.1:{port}", None, 0)


def test_files_of_tls_that_cannot_be_used_are_named(pki, tmp_path):
    with pytest.raises(ConfigError, match="the key is not this certificate's"):
        client_pems(pki["ca"].cert, pki["host"].cert, pki["stranger"].key)
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(ConfigError, match="not PEM"):
        client_pems(str(tmp_path / "ca.pem"))


def test_who_does_not_fit_is_refused_and_the_rest_join(leader):
    for changes, reason in [
        (dict(token=None), "token is not known"),
        (dict(token=b"other"), "token is not known"),
        (dict(host=2), "host-index must be between 1 and 1"),
        (dict(identity=MINE | {"num_draft": "3"}), "num_draft is 3 there and 7 here"),
        (dict(identity={"version": "1"}), "num_draft is None there and 7 here"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            join(leader, **changes)[0].join(LIMIT)
    with pytest.raises(ConfigError, match="host 1 has not connected within 0 s"):
        leader.leader.wait_for_hosts(0)
    stream, process = join(leader)
    joined = queue.Queue()
    threading.Thread(target=lambda: joined.put(stream.join(LIMIT)), daemon=True).start()
    leader.leader.wait_for_hosts(LIMIT)
    with pytest.raises(ConfigError, match="another process is host 1 already"):
        join(leader)[0].join(LIMIT)
    leader.leader.welcome("there:1")
    assert joined.get(timeout=LIMIT) == "there:1"
    performed = queue.Queue()
    follower = SimpleNamespace(perform=performed.put)
    threading.Thread(target=stream.perform, args=(follower,), daemon=True).start()
    for call in CALLS:
        leader.leader.send(call)
    found = [as_lists(performed.get(timeout=LIMIT)) for _ in CALLS]
    assert found == [as_lists(call) for call in CALLS]
    ending = (3, "a test")
    threading.Thread(target=leader.leader.end, args=ending, daemon=True).start()
    assert process.codes.get(timeout=LIMIT) == 70


def test_a_call_that_is_missing_ends_the_follower(leader):
    stream, process = join(leader)
    stream._calls.put(to_message(CALLS[0], 2))
    stream._fate.is_sealed.wait = lambda seconds: None  # no other host has failed
    stream._is_closed.set()
    threading.Thread(target=stream.perform, args=(None,), daemon=True).start()
    assert process.codes.get(timeout=LIMIT) == 1


def connected(leader) -> tuple[LeaderStream, Process]:
    """A follower that has joined."""
    stream, process = join(leader)
    process.close = stream._channel.close
    joined = queue.Queue()
    threading.Thread(target=lambda: joined.put(stream.join(LIMIT)), daemon=True).start()
    leader.leader.wait_for_hosts(LIMIT)
    leader.leader.welcome("there:1")
    joined.get(timeout=LIMIT)
    return stream, process


def test_a_call_without_a_result_ends_all_hosts(leader, caplog):
    """Both hosts send heartbeats, but the round does not end."""
    caplog.set_level("INFO")
    _, follower = connected(leader)
    leader.leader.send(CALLS[1])
    leader.leader.watch_rounds(lambda: time.monotonic() - 61)
    assert leader.process.codes.get(timeout=LIMIT) == 71
    assert follower.codes.get(timeout=LIMIT) == 71
    reason = "no result within 60 s of call 1 (calls dispatched by host 1: 0)"
    for host in (0, 1):
        assert f"host {host} ends with exit code 71: {reason}" in caplog.messages


def test_a_lost_host_is_the_reason_without_a_traceback(leader, caplog):
    """What the leader does with the lost process fails first."""
    stream, _ = connected(leader)

    def fail() -> None:
        with failures_end_all(leader.leader):
            raise RuntimeError("the collective failed")

    threading.Thread(target=fail, daemon=True).start()
    stream._channel.close()
    assert leader.process.codes.get(timeout=LIMIT) == 70
    (line,) = [text for text in caplog.messages if text.startswith("host 0 ends with")]
    assert line.startswith("host 0 ends with exit code 70: host 1 (")
    assert not any(record.exc_info for record in caplog.records)


def test_a_failure_of_its_own_ends_a_host_with_a_traceback(leader, caplog, monkeypatch):
    monkeypatch.setattr(hosts, "_BLAME_SECONDS", 0)

    def fail() -> None:
        with failures_end_all(leader.leader):
            raise RuntimeError("memory is short")

    threading.Thread(target=fail, daemon=True).start()
    assert leader.process.codes.get(timeout=LIMIT) == 1
    assert "host 0 ends with exit code 1: memory is short" in caplog.messages
    assert any(record.exc_info for record in caplog.records)


def test_what_must_be_equal_changes_with_sizes_and_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5 << 20))
    given = dict(model=str(tmp_path), drafter=str(tmp_path))
    before = identity(Settings(**given))
    assert identity(Settings(**given)) == before
    assert identity(Settings(**given, max_num_seqs=5)) != before
    assert identity(Settings(**given, port=5, log_level="debug")) == before
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    changed = identity(Settings(**given))
    differing = {name for name in before if before[name] != changed[name]}
    assert differing == {"files of the target", "files of the drafter"}
