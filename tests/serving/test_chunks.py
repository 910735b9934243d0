"""Chunks of a stream that are written from templates, past the layers of the HTTP server."""

import re

import httpx
import pytest

from serving.http import chat, completions
from serving.http.errors import dump
from tests.serving.test_http_connections import connect, read_all
from tests.waiting import LIMIT

REPLY = '<think>Hm, "é"\n</think>\n\\ Hi \U0001f600!'
REQUESTS = {
    "/v1/chat/completions": dict(messages=[{"role": "user", "content": "a"}]),
    "/v1/completions": dict(prompt="a"),
}
paths = pytest.mark.parametrize("path", REQUESTS)


def body_of(scripted, path: str) -> str:
    """The body of a stream of `REPLY`, a token a chunk, without the time."""
    scripted.say(REPLY)
    ask = REQUESTS[path] | dict(stream=True, max_tokens=100)
    address, headers = f"http://{scripted.live.http_address}{path}", {"x-request-id": "r"}
    with scripted.live.unmerged():
        text = httpx.post(address, json=ask, headers=headers, timeout=LIMIT).text
    return re.sub(r'"created":\d+', '"created":0', text)


@paths
def test_chunks_of_templates_are_those_of_whole_objects(scripted, path, monkeypatch):
    body = body_of(scripted, path)
    assert body.count("data: ") > 20
    monkeypatch.setattr(chat._Choices, "only_text", lambda *args: None)
    monkeypatch.setattr(completions._Choices, "only_text", lambda *args: None)
    assert body == body_of(scripted, path)


@paths
def test_a_client_of_http_1_0_gets_the_same_events(scripted, path):
    body = body_of(scripted, path)
    scripted.say(REPLY)
    ask = dump(REQUESTS[path] | dict(stream=True, max_tokens=100))
    head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\nx-request-id: r\r\n"
    head += f"content-length: {len(ask)}\r\n\r\n"
    with scripted.live.unmerged(), connect(scripted.live.http_address) as connection:
        connection.sendall(head.encode() + ask)
        old = read_all(connection).partition(b"\r\n\r\n")[2].decode()
    assert re.sub(r'"created":\d+', '"created":0', old) == body
