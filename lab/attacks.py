"""The list of attacks on a server: requests, amounts, and valid answers."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

from lab import attempts
from lab.attempts import Attempt, Target
from lab.raw_connections import OPENING, call_headers, pings, rapid_resets, settings
from serving.protos import peagle_v1_pb2 as pb

_MIB = 1 << 20
_FRAMES = 5000  # per connection of a flood


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One kind of hostile request.

    Args:
      name: unique; begins with the protocol.
      prepare: called once per process; builds the request and returns one attempt. An attempt
        returns the answer as a word: a status, "closed" or "held".
      right: valid answers of a correct server.
      count: maximum number of attempts of all clients together.
      clients: maximum number of concurrent clients.
      needs_tls: whether the attack applies only to servers with TLS.
      asks_for_work: whether the requests are valid, so that the engine spends time on them.
    """

    name: str
    prepare: Callable[[Target], Attempt]
    right: frozenset[str]
    count: int
    clients: int
    needs_tls: bool = False
    asks_for_work: bool = False


_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_BODY = _HEADERS + (
    b"Authorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
)
_CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the record is 500 bytes longer


def _text(size: int) -> str:
    words = "def quicksort(xs):\n    return xs if len(xs) < 2 else quicksort(xs[1:])\n"
    return (words * (size // len(words) + 1))[:size]


def _repeated(before: str, item: str, count: int, after: str) -> bytes:
    return f"{before}{','.join(itertools.repeat(item, count))}{after}".encode()


def _request(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]), **fields)


def _chat(count: int, variables: str = "") -> pb.GenerateRequest:
    chat = pb.Chat(variables_json=variables)
    # Parsed from bytes: an empty message has two bytes.
    chat.MergeFromString(b"\x0a\x00" * count)
    return pb.GenerateRequest(chat=chat)


_REFUSED = frozenset({"400", "413"})
_INVALID, _LARGE = frozenset({"INVALID_ARGUMENT"}), frozenset({"RESOURCE_EXHAUSTED"})
_HEAVY = dict(count=48, clients=8)
_MESSAGE = '{"role":"user","content":""}'

_BODIES = (
    (
        "http: text of 15 MiB",
        attempts.post(lambda: json.dumps({"prompt": _text(15 * _MIB)}).encode()),
    ),
    (
        "http: text of 7 MiB",
        attempts.post(lambda: json.dumps({"prompt": _text(7 * _MIB)}).encode()),
    ),
    (
        "http: 300,000 chat messages",
        attempts.post(
            lambda: _repeated('{"messages":[', _MESSAGE, 300_000, "]}"), "/v1/chat/completions"
        ),
    ),
    (
        "http: 5 million prompt ids",
        attempts.post(lambda: _repeated('{"prompt":[', "7", 5_000_000, "]}")),
    ),
    (
        "http: 3 million stop ids",
        attempts.post(lambda: _repeated('{"prompt":"a","stop_token_ids":[', "7", 3_000_000, "]}")),
    ),
    (
        "http: JSON 7 million levels deep",
        attempts.post(lambda: b'{"prompt":' + b"[" * 7_000_000),
    ),
    (
        "http: 1 million duplicate keys",
        attempts.post(lambda: _repeated('{"max_tokens":2,', '"prompt":"a"', 1_000_000, "}")),
    ),
    (
        "http: 1 million unknown keys",
        attempts.post(lambda: f"{{{','.join(f'"k{i}":0' for i in range(1_000_000))}}}".encode()),
    ),
    ("http: body of 32 MiB", attempts.post(lambda: b"[" * (32 * _MIB))),
)
_MESSAGES = (
    ("grpc: text of 15 MiB", lambda: pb.GenerateRequest(text=_text(15 * _MIB))),
    ("grpc: text of 7 MiB", lambda: pb.GenerateRequest(text=_text(7 * _MIB))),
    ("grpc: 400,000 chat messages", lambda: _chat(400_000)),
    (
        "grpc: 5 million prompt ids",
        lambda: pb.GenerateRequest(tokens=pb.TokenIds(ids=[7] * 5_000_000)),
    ),
    (
        "grpc: 3 million stop ids",
        lambda: _request(stopping=pb.Stopping(stop_token_ids=[7] * 3_000_000)),
    ),
    ("grpc: JSON 7 million levels deep", lambda: _chat(1, "[" * 7_000_000)),
    (
        "grpc: 1 million duplicate keys",
        lambda: _chat(1, _repeated("{", '"a":1', 1_000_000, "}").decode()),
    ),
)


_CLOSED = dict(right=frozenset({"closed"}), count=64, clients=64)
_ANY = dict(right=frozenset({"closed", "all sent", "reset"}))
_FLOOD = _ANY | dict(count=64, clients=16)
_RESET = _ANY | dict(count=4000, clients=64)
_FULL = frozenset({"200", "429", "OK", "RESOURCE_EXHAUSTED"})

ATTACKS = (
    *(Attack(name=name, prepare=one, right=_REFUSED, **_HEAVY) for name, one in _BODIES),
    *(
        Attack(name=name, prepare=attempts.call(one), right=_INVALID | _LARGE, **_HEAVY)
        for name, one in _MESSAGES
    ),
    Attack(
        name="grpc: message of 32 MiB",
        right=_LARGE,
        **_HEAVY,
        prepare=attempts.call(lambda: pb.GenerateRequest(text="a" * (32 * _MIB))),
    ),
    Attack(
        name="http: header of 1 MiB",
        right=frozenset({"400", "431"}),
        count=64,
        clients=16,
        prepare=attempts.big_header,
    ),
    Attack(
        name="grpc: metadata of 1 MiB",
        right=_LARGE,
        count=64,
        clients=16,
        prepare=attempts.call(_request, ("x-padding", "a" * _MIB)),
    ),
    Attack(
        name="http: constraints of great cost",
        right=_REFUSED,
        count=60,
        clients=16,
        prepare=attempts.costly_constraints,
    ),
    Attack(
        name="http: two lengths of a body",
        right=frozenset({"400"}),
        count=64,
        clients=16,
        prepare=attempts.two_lengths,
    ),
    Attack(name="http: silent connections", prepare=attempts.held("http"), **_CLOSED),
    Attack(name="grpc: silent connections", prepare=attempts.held("grpc"), **_CLOSED),
    Attack(
        name="http: dripped headers",
        prepare=attempts.held("http", _HEADERS, drip=b"X-A: b\r\n"),
        **_CLOSED,
    ),
    Attack(name="http: dripped bodies", prepare=attempts.held("http", _BODY, drip=b" "), **_CLOSED),
    Attack(
        name="grpc: dripped preface",
        prepare=attempts.held("grpc", OPENING[:3], drip=OPENING[3:14]),
        **_CLOSED,
    ),
    Attack(
        name="http: idle TLS handshakes",
        prepare=attempts.held("http", _CLIENT_HELLO),
        needs_tls=True,
        **_CLOSED,
    ),
    Attack(
        name="grpc: idle TLS handshakes",
        prepare=attempts.held("grpc", _CLIENT_HELLO),
        needs_tls=True,
        **_CLOSED,
    ),
    Attack(name="http: connects and resets", prepare=attempts.resets("http", _HEADERS), **_RESET),
    Attack(
        name="grpc: connects and resets",
        **_RESET,
        prepare=attempts.resets("grpc", OPENING + call_headers(attempts.GENERATE, 1)),
    ),
    Attack(
        name="grpc: rapid resets",
        prepare=attempts.floods(lambda: rapid_resets(attempts.GENERATE, _FRAMES)),
        **_FLOOD,
    ),
    Attack(name="grpc: ping flood", prepare=attempts.floods(lambda: pings(_FRAMES)), **_FLOOD),
    Attack(
        name="grpc: settings flood", prepare=attempts.floods(lambda: settings(_FRAMES)), **_FLOOD
    ),
    Attack(
        name="http: streams that are not read",
        prepare=attempts.unread_events,
        right=_FULL,
        count=32,
        clients=16,
        asks_for_work=True,
    ),
    Attack(
        name="grpc: streams that are not read",
        prepare=attempts.unread_messages,
        right=_FULL,
        count=32,
        clients=16,
        asks_for_work=True,
    ),
    Attack(
        name="grpc: aborts of others' requests",
        prepare=attempts.aborts,
        right=frozenset({"OK, 0 ended"}),
        count=4000,
        clients=16,
    ),
)
"""All kinds, in the order of the table."""
