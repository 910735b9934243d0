"""Hostile clients: functions for one attempt of each attack; the result is the answer as a word."""

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import grpc

from lab.raw_connections import (
    Address,
    connected,
    exchange,
    flood,
    head,
    is_closed,
    reset,
    status,
)
from serving.protos import peagle_v1_pb2 as pb

GENERATE = "/peagle.v1.Generation/GenerateOnce"
_ABORT = "/peagle.v1.Generation/Abort"
_STREAM = "/peagle.v1.Generation/Generate"
_MIB = 1 << 20
_DRIP = 0.25  # seconds between two bytes
_CONNECTIONS = 8  # open at the same time, per client
_HELD_TOKENS = 64  # length of a stream that its client does not read
_UNREAD_SECONDS = 5.0  # for which such a stream stays open

Attempt = Callable[[], Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Addresses and credentials for hostile clients.

    Args:
      http, grpc: addresses of the server.
      token: a valid bearer token.
      victim: request id of another caller, with a different token.
      hold_seconds: how long to hold a connection that sends nothing or too little.
    """

    http: Address
    grpc: Address
    token: str
    victim: str
    hold_seconds: float


def _json_head(target: Target, path: str, size: int, *headers: tuple[str, str]) -> bytes:
    common = (
        ("Authorization", f"Bearer {target.token}"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(size)),
    )
    return head("POST", path, (*common, *headers))


def post(body: Callable[[], bytes], path: str = "/v1/completions"):
    """Attempts that send one whole body."""

    def prepare(target: Target) -> Attempt:
        content = body()
        request = _json_head(target, path, len(content)) + content
        return lambda: exchange(target.http, request)

    return prepare


def call(message: Callable[[], pb.GenerateRequest], *metadata: tuple[str, str]):
    """Attempts that make one whole gRPC call, each on a connection of its own."""

    def prepare(target: Target) -> Attempt:
        content = message().SerializeToString()

        async def attempt() -> str:
            async with _channel(target) as channel:
                return await _code(channel.unary_unary(GENERATE), target, content, metadata)

        return attempt

    return prepare


def _channel(target: Target) -> grpc.aio.Channel:
    address = f"{target.grpc.host}:{target.grpc.port}"
    options = [
        ("grpc.use_local_subchannel_pool", 1),  # or all channels would share a connection
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 4 * _MIB),
    ]
    return grpc.aio.insecure_channel(address, options=options)


async def _code(method, target: Target, content: bytes, metadata: Iterable = ()) -> str:
    own = ("authorization", f"Bearer {target.token}")
    try:
        await method(content, metadata=(own, *metadata))
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name


def costly_constraints(target: Target) -> Attempt:
    """Constraints whose check exceeds its limits, each one a new one."""
    numbers = itertools.count(200_000)

    def attempt() -> Awaitable[str]:
        pattern = f"{os.getpid()}a{{{next(numbers)}}}"
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": pattern}}
        content = json.dumps(body).encode()
        return exchange(target.http, _json_head(target, "/v1/completions", len(content)) + content)

    return attempt


def big_header(target: Target) -> Attempt:
    request = _json_head(target, "/v1/completions", 2, ("X-Padding", "a" * _MIB)) + b"{}"
    return lambda: exchange(target.http, request)


def two_lengths(target: Target) -> Attempt:
    """A body with two lengths; a proxy in front may use the other one (RFC 9112, section 6.1)."""
    content = b"0\r\n\r\n"
    request = _json_head(target, "/v1/completions", len(content), ("Transfer-Encoding", "chunked"))

    async def attempt() -> str:
        async with connected(target.http) as (reader, writer):
            writer.write(request + content)
            first = await status(reader)
            return first if await is_closed(reader, 5.0) else f"{first} and kept open"

    return attempt


def held(port: str, *parts: bytes, drip: bytes = b""):
    """Attempts that keep connections open: "closed" by the server, or "held" until the client gives
    up.

    Args:
      port: "http" or "grpc".
      parts: sent at once; each may contain %s for the bearer token.
      drip: then sent repeatedly, one byte at a time.
    """

    def prepare(target: Target) -> Attempt:
        address = getattr(target, port)
        opening = b"".join(parts).replace(b"%s", target.token.encode())

        async def one() -> bool:
            # A connection without TLS: the server waits for the handshake.
            async with connected(Address(address.host, address.port)) as (reader, writer):
                writer.write(opening)
                sender = asyncio.create_task(_send_slowly(writer, drip))
                try:
                    return await is_closed(reader, target.hold_seconds)
                finally:
                    sender.cancel()
                    await asyncio.gather(sender, return_exceptions=True)

        async def attempt() -> str:
            done = await asyncio.gather(
                *(one() for _ in range(_CONNECTIONS)), return_exceptions=True
            )
            return "held" if any(found is False for found in done) else "closed"

        return attempt

    return prepare


async def _send_slowly(writer: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(OSError):
        for byte in itertools.cycle(content):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(_DRIP)


def resets(port: str, opening: bytes):
    """Attempts that connect, send a little, and reset the connection."""

    def prepare(target: Target) -> Attempt:
        async def attempt() -> str:
            async with connected(getattr(target, port)) as (_, writer):
                writer.write(opening)
                await asyncio.sleep(0)
                reset(writer)
            return "reset"

        return attempt

    return prepare


def floods(frames: Callable[[], Iterable[bytes]]):
    return lambda target: lambda: flood(target.grpc, frames())


def unread_events(target: Target) -> Attempt:
    """Asks for a stream of events and reads none of them."""
    body = {"prompt": [5, 6, 7], "max_tokens": _HELD_TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    request = _json_head(target, "/v1/completions", len(content)) + content

    async def attempt() -> str:
        async with connected(target.http, receive_bytes=2048) as (reader, writer):
            writer.write(request)
            found = await status(reader)
            await asyncio.sleep(_UNREAD_SECONDS)
            return found

    return attempt


def unread_messages(target: Target) -> Attempt:
    """Makes a streaming call and reads no message of it."""
    stopping = pb.Stopping(max_tokens=_HELD_TOKENS, ignore_eos=True)
    tokens = pb.TokenIds(ids=[5, 6, 7])
    content = pb.GenerateRequest(tokens=tokens, stopping=stopping).SerializeToString()

    async def attempt() -> str:
        async with _channel(target) as channel:
            own = ("authorization", f"Bearer {target.token}")
            call = channel.unary_stream(_STREAM)(content, metadata=(own,))
            try:
                await call.initial_metadata()
                await asyncio.sleep(_UNREAD_SECONDS)
                return "OK"
            except grpc.aio.AioRpcError as error:
                return error.code().name
            finally:
                call.cancel()

    return attempt


def aborts(target: Target) -> Attempt:
    """Aborts requests by ids of other callers, and by unknown ids."""
    ids = [target.victim, *(f"{target.victim}-{place}" for place in range(1000))]
    content = pb.AbortRequest(request_ids=ids).SerializeToString()

    async def attempt() -> str:
        async with _channel(target) as channel:
            method = channel.unary_unary(_ABORT, response_deserializer=pb.AbortResponse.FromString)
            own = (("authorization", f"Bearer {target.token}"),)
            try:
                answer = await method(content, metadata=own)
                return f"OK, {answer.aborted} ended"
            except grpc.aio.AioRpcError as error:
                return error.code().name

    return attempt
