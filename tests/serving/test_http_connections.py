"""Connections that keep the HTTP server waiting, too many of them, and ambiguous heads."""

import asyncio
import contextlib
import errno
import http.client
import itertools
import json
import random
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import httpx
import pytest

from serving.http import body
from serving.http.connection import LingeringTransport, TimeLimits, find_fault
from serving.http.gate import Gate
from serving.http.listener import Listener
from serving.http.server import _listen
from serving.tls import Certificates
from tests.serving.certificates import authority, signed
from tests.serving.test_http_errors import refusal
from tests.waiting import LIMIT, eventually, soon

HOST = b"Host: x\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
SHORT = TimeLimits(head=0.3, write=0.3, linger=0.3)


def connect(address: str, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT, source_address=(source, 0))


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes, or resets."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            data += more
    return data


@pytest.fixture
def gate():
    return Gate(most=4, most_per_address=4, reserve=2)


@pytest.fixture(scope="module")
def common(live):
    """An address for tests that leave nothing behind."""
    with live.another_http(allowed_hosts=["Named.example"]) as address:
        yield address


@pytest.fixture
def patient(server, gate):
    """A server with small limits and the usual time_limits."""
    with server.another_http(gate=gate) as address:
        yield address


@pytest.fixture
def impatient(server, gate):
    with server.another_http(gate=gate, time_limits=SHORT) as address:
        yield address


SMUGGLED = {
    "both framings": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a signed length": POST + b"Content-Length: +5\r\n\r\nhello",
    "a space before the colon": POST + b"Content-Length : 5\r\n\r\nhello",
    "two codings": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a coding of HTTP/1.0": POST.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": GET + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a bare line feed": GET + b"X: a\nContent-Length: 5\r\n\r\n",
    "a bare line feed at the end": GET + b"\n",
    "a zero byte": GET + b"X: a\x00b\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "a bare line feed in a chunk's head": POST
    + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "a chunk longer than it says": POST
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("kind", SMUGGLED)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_ends_the_connection(common, kind):
    with connect(common) as connection:
        connection.sendall(SMUGGLED[kind] + GET + b"\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1") == 1  # what follows is never taken for a request
    assert b"connection: close" in answer.lower()


def test_a_grpc_client_of_the_http_port_ends_and_is_told_why(common):
    """A GOAWAY would have it connect again without a pause, in more and more memory."""
    with connect(common) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"--port" in answer
    client = f"{sys.executable} -m serving.client --address {common} x"
    bounded = f"ulimit -v {16 << 20}; exec {client}"  # KiB, for a client that never ends
    done = subprocess.run(
        ["sh", "-c", bounded], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert f"{common} does not speak gRPC: give the --port" in done.stderr


def test_a_bad_head_is_found_behind_a_good_request_too(common):
    with connect(common) as connection:
        connection.sendall(GET + b"\r\n" + SMUGGLED["a folded header"] + GET + b"\r\n")
        answer = read_all(connection)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


def test_ordinary_heads_have_no_fault_wherever_they_are_cut():
    head = POST + b"Content-Length: 5\r\nContent-Length: 5\r\nX:\r\n\r\n"
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    for whole in (GET + b"\r\n", head + b"a\rb\n c", chunked + b"1\r\n\n\r\n0\r\n\r\n"):
        assert [find_fault(whole[:end]) for end in range(len(whole) + 1)] == [None] * (
            len(whole) + 1
        )


@pytest.mark.sampled(2, slow=1)
@pytest.mark.parametrize("sent", [b"", b"GET /hea", GET + b"X: y", b"\x00"])
def test_a_head_that_does_not_come_ends_the_connection(impatient, gate, sent):
    with connect(impatient) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer[:13] in ((b"HTTP/1.1 408 ", b"HTTP/1.1 400 ") if sent else (b"",))
    eventually(lambda: gate.num_open == 0)


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("first", [b"", GET + b"\r\n"])
def test_bytes_that_drip_do_not_extend_the_time_for_a_head(impatient, gate, first):
    with connect(impatient) as connection:
        connection.sendall(first)
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 2000:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        answer = read_all(connection)
    assert b"200 OK" not in answer.partition(b"408")[2]
    assert answer.count(b"HTTP/1.1 200") == bool(first)
    eventually(lambda: gate.num_open == 0)


def test_an_answer_that_is_not_read_ends_the_connection(impatient, gate):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = impatient.rpartition(":")
        connection.settimeout(30)
        connection.connect((host, int(port)))
        one = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                connection.sendall(one)
        eventually(lambda: gate.num_open == 0)


def test_a_handshake_that_does_not_come_ends_the_connection(server, gate, tmp_path):
    pair = signed(tmp_path, "server", authority(tmp_path, "ca"))
    certificates = Certificates(pair.cert, pair.key)
    with (
        server.another_http(gate=gate, time_limits=SHORT, certificates=certificates) as address,
        connect(address) as connection,
    ):
        assert read_all(connection) == b""
        eventually(lambda: gate.num_open == 0)
        context = ssl._create_unverified_context()
        assert httpx.get(f"https://{address}/health", verify=context).status_code == 200
        eventually(lambda: gate.num_open == 0)


def status(address: str, path: str = "/health", source: str = "127.0.0.1") -> httpx.Response:
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, timeout=LIMIT) as client:
        return client.get(f"http://{address}{path}")


@pytest.mark.parametrize("sent", [b"", b"GET /hea", GET + b"\r\n"])
def test_a_new_connection_replaces_the_oldest_idle_one(patient, gate, sent):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(patient)) for _ in range(4)]
        for one in idle:
            one.sendall(sent)
            if sent.endswith(b"\r\n\r\n"):
                assert one.recv(15) == b"HTTP/1.1 200 OK"
        eventually(lambda: gate.num_open == 4)
        for oldest in idle:
            newest = stack.enter_context(connect(patient))
            newest.sendall(GET + b"\r\n")
            assert newest.recv(15) == b"HTTP/1.1 200 OK"
            read_all(oldest)
            assert gate.num_open == 4


def test_connections_that_were_reset_in_the_queue_get_no_protocol(
    server, patient, gate, monkeypatch
):
    entered = []
    enter = gate.enter
    monkeypatch.setattr(gate, "enter", lambda *given: entered.append(given) or enter(*given))

    def connect_and_reset() -> None:
        """Runs in the event loop, so the server accepts afterwards."""
        for _ in range(50):
            with connect(patient) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server.call(connect_and_reset)
    assert status(patient).status_code == 200
    assert len(entered) == 1


def test_health_is_answered_while_all_connections_are_busy(server, patient, gate):
    body = b'{"prompt": "a", "max_tokens": 2, "ignore_eos": true}'
    with server.paced(), contextlib.ExitStack() as stack:
        for _ in range(4):
            one = stack.enter_context(connect(patient))
            one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: server.call(lambda: server.frontend.num_open) == 4)
        # Silent clients without a token take no reserved place either.
        for _ in range(3):
            stack.enter_context(connect(patient))
        for _ in range(5):
            health = status(patient)
            assert health.status_code == 200
            assert health.headers["connection"] == "close"
        refused = status(patient, "/v1/models")
        assert "too many connections" in refusal(refused, 503)["message"]
        assert refused.headers["retry-after"] == "1"
        assert gate.num_open <= 4 + 2


def test_addresses_of_one_network_count_as_one():
    gate = Gate(most=9, most_per_address=1, reserve=0)
    closed = []
    for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1", "10.0.0.1"):
        gate.enter(address, lambda address=address: closed.append(address))
    assert closed == ["2001:db8::1", "::ffff:10.0.0.1"]


@pytest.mark.parametrize("seed", range(3))
def test_the_counts_of_the_gate_are_right_after_any_sequence(num_cases, seed):

    rng = random.Random(seed)
    clock = itertools.count(0, 0.2).__next__
    gate = Gate(most=5, most_per_address=3, reserve=2, clock=clock)
    slots = []
    for _ in range(num_cases("arrivals and departures", 2000)):
        kind = rng.randrange(4)
        if kind == 0 or not slots:
            slot = gate.enter(rng.choice("abc"), lambda: None)
            slots += [slot] if slot is not None else []
        elif kind == 1:
            gate.leave(rng.choice(slots))
        else:
            gate.set_idle(rng.choice(slots), kind == 2)
        slots = [one for one in slots if one.is_open or rng.random() < 0.5]
        held = [one for one in slots if one.is_open]
        ordinary = [one.address for one in held if not one.is_reserved]
        assert len(held) == gate.num_open <= 7
        assert len(ordinary) <= 5
        assert all(ordinary.count(address) <= 3 for address in "abc")
    for slot in slots:
        gate.leave(slot)
    assert gate.num_open == 0


class Starved:
    """A listening socket of a process that has no descriptor left until `is_starved` is False."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self.fileno = listener.fileno
        self.is_starved = True
        self.failures: list[float] = []

    def accept(self):
        if self.is_starved:
            self.failures.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def test_without_descriptors_the_server_pauses_and_closes_idle_connections(caplog):
    closed = []

    async def run():
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        starved = Starved(listener)
        gate = Gate(most=9, most_per_address=9)
        gate.enter("10.0.0.1", lambda: closed.append("idle"))
        came = asyncio.Event()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport):
                came.set()
                transport.close()

        server = Listener(
            starved, lambda slot: Protocol(), context=None, gate=gate, handshake_seconds=9
        )
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await soon(lambda: len(starved.failures) >= 2)
        assert starved.failures[1] - starved.failures[0] > 0.09  # a pause, for other work
        starved.is_starved = False
        await asyncio.wait_for(came.wait(), LIMIT)
        writer.close()
        server.close()
        await server.wait_closed()
        listener.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert closed == ["idle"]
    lines = [record.getMessage() for record in caplog.records if "accept" in record.getMessage()]
    assert lines[0].endswith("Too many open files); closed the oldest idle one")
    assert len(lines) < 5


HOSTS = dict.fromkeys(("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80"), 200)
HOSTS |= dict.fromkeys(("127.0.0.2", "[::1]", "[::1]:8000", "localhost.", "named.example:1"), 200)
HOSTS |= dict.fromkeys(("evil.example", "evil.example:8000", "localhost.evil.example"), 403)
HOSTS |= dict.fromkeys(("127.0.0.1.evil.example", "10.0.0.1", "[::2]", "", "a@localhost"), 403)


@pytest.mark.parametrize("host", HOSTS)
def test_a_foreign_host_is_refused(common, host):
    asked = httpx.get(f"http://{common}/v1/models", headers={"host": host})
    assert asked.status_code == HOSTS[host]
    if asked.status_code == 403:
        assert "--allowed-hosts" in refusal(asked, 403)["message"]
    assert httpx.get(f"http://{common}/health", headers={"host": host}).status_code == 200


def test_any_host_is_served_where_the_operator_says_so(server):
    for allowed in (None, ["*"]):
        with server.another_http(allowed_hosts=allowed) as address:
            asked = httpx.get(f"http://{address}/v1/models", headers={"host": "evil.example"})
            assert asked.status_code == 200


def test_a_small_message_does_not_wait_for_the_acknowledgement_of_the_one_before():
    with _listen("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


SIZE = 4 << 20  # bytes of a body; more than the kernel's buffers hold
HEADS = {
    "413": POST + b"Content-Length: 900000000\r\n\r\n",
    "413, and close": POST + b"Connection: close\r\nContent-Length: 900000000\r\n\r\n",
    "404": b"POST /nothing HTTP/1.1\r\n" + HOST + b"Content-Length: 900000000\r\n\r\n",
    "400": POST + b"Content-Length: 5, 6\r\n\r\n",
}


@pytest.fixture
def wide():
    return Gate(most=9, most_per_address=9, reserve=2)


@pytest.mark.parametrize("kind", HEADS)
def test_an_answer_is_read_after_all_of_a_body_was_sent(server, wide, kind):
    """No byte of the answer is read before: a reset would discard it."""
    with server.another_http(gate=wide) as address, connect(address) as connection:
        connection.sendall(HEADS[kind])
        for _ in range(SIZE >> 16):
            connection.sendall(b" " * (1 << 16))
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
        assert answer.startswith(f"HTTP/1.1 {kind[:3]} ".encode())
        assert answer.count(b"HTTP/1.1") == 1
        assert b"connection: close\r\n" in answer.lower()
        eventually(lambda: wide.num_open == 0)


def test_a_client_that_goes_on_sending_is_cut_off(server, wide, monkeypatch):
    monkeypatch.setattr("serving.http.connection._MOST_DISCARDED", 1 << 20)
    time_limits = TimeLimits(linger=3600.0, write=3600.0)  # bytes are what ends it
    with (
        server.another_http(gate=wide, time_limits=time_limits) as address,
        connect(address) as connection,
    ):
        connection.sendall(HEADS["413"])
        with contextlib.suppress(ConnectionError):
            for _ in range(SIZE << 4 >> 16):
                connection.sendall(b" " * (1 << 16))
        eventually(lambda: wide.num_open == 0)


def test_a_client_that_neither_sends_nor_ends_is_cut_off(server, wide):
    with (
        server.another_http(gate=wide, time_limits=TimeLimits(linger=0.2)) as address,
        connect(address) as connection,
    ):
        connection.sendall(HEADS["413"])
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")  # the server's end comes at once
        eventually(lambda: wide.num_open == 0)


def test_a_request_that_was_read_to_its_end_keeps_its_connection(server, wide):
    body = '{"prompt": 5}'
    with (
        server.another_http(gate=wide) as address,
        contextlib.closing(http.client.HTTPConnection(address, timeout=LIMIT)) as connection,
    ):
        for _ in range(2):
            # The content type is checked before the body is read.
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            mine = connection.sock
            answer = connection.getresponse()
            assert answer.status == 400
            assert answer.getheader("connection") != "close"
            answer.read()
            assert connection.sock is mine


class Pipe:
    """A transport that only counts."""

    def __init__(self, *, can_write_eof: bool):
        self.calls: list[str] = []
        self.can_write_eof = lambda: can_write_eof
        for name in ("close", "write_eof", "resume_reading"):
            setattr(self, name, lambda name=name: self.calls.append(name))
        self.is_closing = lambda: "close" in self.calls


@pytest.mark.parametrize("can_write_eof", [True, False])
def test_both_kinds_of_transport_are_closed_in_the_end(can_write_eof):
    async def run() -> list[str]:
        pipe = Pipe(can_write_eof=can_write_eof)
        transport = LingeringTransport(pipe, lambda: True, seconds=0.0)
        transport.close()
        transport.close()
        assert transport.is_lingering
        assert transport.is_closing()
        assert not pipe.is_closing()
        for _ in range(1000):
            if pipe.is_closing():
                break
            await asyncio.sleep(0.001)
        return pipe.calls

    half = ["write_eof"] if can_write_eof else []
    assert asyncio.run(run()) == [*half, "resume_reading", "close"]


class Hall:
    """A gate with a clock of its own; connections are named "address/number"."""

    def __init__(self, **limits: int):
        self.now = 0.0
        self.gate = Gate(**limits, grace_seconds=1.0, clock=lambda: self.now)
        self.closed: list[str] = []
        self.slots: dict[str, object] = {}

    def enter(self, *names: str) -> None:
        for name in names:
            close = lambda name=name: self.closed.append(name)
            self.slots[name] = self.gate.enter(name.partition("/")[0], close)

    def serve(self, name: str) -> None:
        """A request and its answer."""
        self.gate.set_idle(self.slots[name], False)
        self.gate.set_idle(self.slots[name], True)


def test_a_burst_replaces_its_own_young_connections():
    hall = Hall(most=3, most_per_address=3)
    hall.enter("probe/1", "burst/1", "burst/2", "burst/3", "burst/4")
    assert hall.closed == ["burst/1", "burst/2"]


def test_an_older_connection_is_replaced_before_a_young_one():
    hall = Hall(most=3, most_per_address=3)
    hall.enter("silent/1")
    hall.now = 0.5
    hall.enter("kept/1")
    hall.serve("kept/1")
    hall.now = 1.6
    hall.enter("burst/1", "burst/2", "burst/3", "burst/4")
    assert hall.closed == ["silent/1", "kept/1", "burst/1"]


def test_an_answered_connection_is_replaced_before_a_young_one_of_another_address():
    hall = Hall(most=2, most_per_address=2)
    hall.enter("probe/1")
    hall.now = 0.1
    hall.enter("kept/1")
    hall.serve("kept/1")
    hall.enter("new/1")
    assert hall.closed == ["kept/1"]


def test_silent_connections_are_spared_for_the_grace_only():
    hall = Hall(most=2, most_per_address=2)
    hall.enter("first/1")
    hall.now = 0.5
    hall.enter("second/1")
    hall.now = 1.2
    hall.enter("second/2")
    assert hall.closed == ["first/1"]


@pytest.mark.parametrize("most_per_address", [4, 2])
def test_a_probe_is_answered_in_a_burst_of_connections(server, most_per_address):
    """All wait in the listening socket's queue, so that one turn of the event loop accepts them."""
    gate = Gate(most=4, most_per_address=most_per_address, reserve=1, grace_seconds=LIMIT)
    is_held, released = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        assert released.wait(LIMIT)

    with server.another_http(gate=gate) as address, contextlib.ExitStack() as stack:
        holding = threading.Thread(target=server.call, args=(hold,))
        holding.start()
        try:
            assert is_held.wait(LIMIT)
            probe = stack.enter_context(connect(address, "127.0.0.2"))
            burst = [stack.enter_context(connect(address, "127.0.0.3")) for _ in range(30)]
        finally:
            released.set()
            holding.join(LIMIT)
        for one in burst[:20]:
            assert read_all(one) == b""  # closed, so all of them were accepted
        probe.sendall(GET + b"\r\n")
        assert probe.recv(15, socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"


def test_a_body_that_never_comes_whole_ends_in_a_status(server, monkeypatch):
    monkeypatch.setattr(body, "_SECONDS", 0.2)
    with connect(server.http_address) as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert read_all(connection).startswith(b"HTTP/1.1 504 ")


def test_clients_that_leave_before_their_request_is_complete(server, caplog):
    for part in (b"POST /v1/comp", POST, POST + b"Content-Length: 100\r\n\r\n{"):
        with connect(server.http_address) as connection:
            connection.sendall(part)
    assert status(server.http_address).status_code == 200
    server.call(lambda: None)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_bytes_that_are_not_http_are_refused(server):
    with connect(server.http_address) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")  # a TLS client at a port without TLS
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_requests_of_one_connection_are_answered_in_order(server):
    bodies = [json.dumps(dict(prompt="a", max_tokens=n, ignore_eos=True)).encode() for n in (9, 3)]
    with connect(server.http_address) as connection:
        for one in bodies:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(one) + one)
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    counts = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in answers]
    assert [one["usage"]["completion_tokens"] for one in counts[:2]] == [9, 3]
    assert counts[2] == {"status": "serving", "paused": False}
