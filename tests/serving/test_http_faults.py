"""HTTP clients that send incomplete bodies, or bytes that are not HTTP."""

import json
import socket

import httpx
import pytest

from serving.http import body
from tests.waiting import LIMIT

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def connect(live):
    made = []

    def connect() -> socket.socket:
        host, _, port = live.http_address.partition(":")
        made.append(socket.create_connection((host, int(port)), timeout=LIMIT))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_a_body_that_never_comes_whole_ends_in_a_status(server, connect, monkeypatch):
    monkeypatch.setattr(body, "_SECONDS", 0.2)
    connection = connect()
    connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert read_all(connection).startswith(b"HTTP/1.1 504 ")


def test_clients_that_leave_before_their_request_is_complete(server, connect, caplog):
    for part in (b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{"):
        connection = connect()
        connection.sendall(part)
        connection.close()
    assert httpx.get(f"http://{server.http_address}/health").status_code == 200
    server.call(lambda: None)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_bytes_that_are_not_http_are_refused(server, connect):
    connection = connect()
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")  # a TLS client at a port without TLS
    assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_requests_of_one_connection_are_answered_in_order(server, connect):
    connection = connect()
    bodies = [json.dumps(dict(prompt="a", max_tokens=n, ignore_eos=True)).encode() for n in (9, 3)]
    for one in bodies:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(one) + one)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    counts = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in answers]
    assert [one["usage"]["completion_tokens"] for one in counts[:2]] == [9, 3]
    assert counts[2] == {"status": "serving"}
