"""The last answer of a connection reaches a client that is still sending."""

import asyncio
import contextlib
import http.client
import socket

import pytest

from serving.http.connection import LingeringTransport, TimeLimits
from serving.http.gate import Gate
from tests.serving.test_http_connections import HOST, POST, connect, read_all
from tests.waiting import LIMIT, eventually

SIZE = 4 << 20  # bytes of a body; more than the kernel's buffers hold
HEADS = {
    "413": POST + b"Content-Length: 900000000\r\n\r\n",
    "413, and close": POST + b"Connection: close\r\nContent-Length: 900000000\r\n\r\n",
    "404": b"POST /nothing HTTP/1.1\r\n" + HOST + b"Content-Length: 900000000\r\n\r\n",
    "400": POST + b"Content-Length: 5, 6\r\n\r\n",
}


@pytest.fixture
def gate():
    return Gate(most=9, most_per_address=9, reserve=2)


@pytest.mark.parametrize("kind", HEADS)
def test_an_answer_is_read_after_all_of_a_body_was_sent(server, gate, kind):
    """No byte of the answer is read before: a reset would discard it."""
    with server.another_http(gate=gate) as address, connect(address) as connection:
        connection.sendall(HEADS[kind])
        for _ in range(SIZE >> 16):
            connection.sendall(b" " * (1 << 16))
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
        assert answer.startswith(f"HTTP/1.1 {kind[:3]} ".encode())
        assert answer.count(b"HTTP/1.1") == 1
        assert b"connection: close\r\n" in answer.lower()
        eventually(lambda: gate.num_open == 0)


def test_a_client_that_goes_on_sending_is_cut_off(server, gate, monkeypatch):
    monkeypatch.setattr("serving.http.connection._MOST_DISCARDED", 1 << 20)
    time_limits = TimeLimits(linger=3600.0, write=3600.0)  # bytes are what ends it
    with (
        server.another_http(gate=gate, time_limits=time_limits) as address,
        connect(address) as connection,
    ):
        connection.sendall(HEADS["413"])
        with contextlib.suppress(ConnectionError):
            for _ in range(SIZE << 4 >> 16):
                connection.sendall(b" " * (1 << 16))
        eventually(lambda: gate.num_open == 0)


def test_a_client_that_neither_sends_nor_ends_is_cut_off(server, gate):
    with (
        server.another_http(gate=gate, time_limits=TimeLimits(linger=0.2)) as address,
        connect(address) as connection,
    ):
        connection.sendall(HEADS["413"])
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")  # the server's end comes at once
        eventually(lambda: gate.num_open == 0)


def test_a_request_that_was_read_to_its_end_keeps_its_connection(server, gate):
    body = '{"prompt": 5}'
    with (
        server.another_http(gate=gate) as address,
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
