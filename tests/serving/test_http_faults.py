"""HTTP clients that send incomplete bodies, or bytes that are not HTTP."""

import asyncio
import json
import random
import socket

import httpx
import pytest

from serving.http import body
from serving.http.chat import ChatFields
from serving.http.completions import CompletionFields
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


NAMES = sorted({"unknown", *ChatFields.model_fields, *CompletionFields.model_fields})
VALUES = [
    *(None, True, False, 0, 1, 2, -1, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**300, "", "a"),
    *("\x00", "\ud800", "a" * 5000, "tiny", [], {}, [0], [127], [128], [-1], ["a"], [""], [[]]),
    *([[5, 6], [7]], [{}], [{"role": "user", "content": "a"}], {"a": 1}, {"include_usage": True}),
    *([{"role": "user", "content": [{"type": "text", "text": "a"}]}], [None], [True], [1.5], "🙂"),
]


@pytest.mark.parametrize("seed", range(4))
def test_no_nonsense_is_more_than_a_refusal(server, seed, num_cases):
    rng = random.Random(seed)
    count = num_cases("HTTP requests with nonsense in their fields", 150, least=50)

    def request() -> tuple[str, bytes]:
        chat = rng.random() < 0.5
        path = "/v1/chat/completions" if chat else "/v1/completions"
        messages = [{"role": "user", "content": "a"}]
        content = dict(messages=messages) if chat else dict(prompt="a")
        content |= {"max_tokens": 2}
        for _ in range(rng.randint(1, 3)):
            content[rng.choice(NAMES)] = rng.choice(VALUES)
        return path, json.dumps(content).encode()

    async def send_all() -> list[httpx.Response]:
        headers = {"content-type": "application/json"}
        gate = asyncio.Semaphore(16)
        async with httpx.AsyncClient(
            base_url=f"http://{server.http_address}", headers=headers, timeout=LIMIT
        ) as http:

            async def send(path: str, content: bytes) -> httpx.Response:
                async with gate:
                    return await http.post(path, content=content)

            return await asyncio.gather(*(send(*request()) for _ in range(count)))

    statuses = set()
    for answer in asyncio.run(send_all()):
        sent = answer.request.content
        assert answer.status_code in (200, 400, 404, 409), (sent, answer.text)
        statuses.add(answer.status_code)
        if answer.headers["content-type"] == "application/json":
            assert ("error" in answer.json()) == (answer.status_code != 200)
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text, (sent, answer.text)
    assert {200, 400} <= statuses
