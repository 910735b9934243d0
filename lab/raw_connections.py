"""Connections without a client library: HTTP/1.1 as bytes, HTTP/2 frame by frame, resets,
silence."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 1, 3, 4, 6
_END_HEADERS = 4
_CANCEL = 8  # error code of RST_STREAM


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the TLS settings of its clients (None: no TLS)."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, text: str, tls: ssl.SSLContext | None = None) -> "Address":
        """From "host:port"."""
        host, _, port = text.rpartition(":")
        return cls(host, int(port), tls)


@contextlib.asynccontextmanager
async def connected(
    address: Address, *, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is reset, not drained, at the end of the block.

    Args:
      receive_bytes: size of the kernel's receive buffer, for clients that never read.

    Raises:
      OSError: the server does not accept connections.
    """
    options = {}
    if receive_bytes is not None:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (address.host, address.port))
        options = dict(sock=made)
    else:
        options = dict(host=address.host, port=address.port)
    if address.tls is not None:
        options |= dict(ssl=address.tls, server_hostname=address.host)
    reader, writer = await asyncio.open_connection(**options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST: a linger time of 0 discards unsent bytes."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def head(method: str, path: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Request line and headers of an HTTP/1.1 request, the empty line included."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def exchange(address: Address, request: bytes) -> str:
    """Sends a whole HTTP/1.1 request and returns the status, as "400", or "closed".

    The answer is read while the request is still being sent: a server may refuse early.
    """
    async with connected(address) as (reader, writer):
        send = asyncio.create_task(_send(writer, request))
        try:
            return await status(reader)
        finally:
            send.cancel()
            await asyncio.gather(send, return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(request)
        await writer.drain()


async def status(reader: asyncio.StreamReader) -> str:
    """The status of an HTTP/1.1 answer; "closed" if none comes."""
    try:
        line = await reader.readline()
    except OSError:
        return "closed"
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


async def is_closed(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Whether the server closes the connection within `seconds`; what it sends is discarded."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            while await reader.read(1 << 16):
                pass
            return True
        return False
    return reader.at_eof() or reader.exception() is not None


def frame(kind: int, content: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return (
        len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
    )


OPENING = PREFACE + frame(_SETTINGS)


def call_headers(path: str, stream: int, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """A HEADERS frame that begins a gRPC call; header fields are literals (RFC 7541, section
    6.2.2)."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "127.0.0.1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *headers,
    ]
    texts = (text.encode() for pair in fields for text in pair)
    sized = [bytes([len(text)]) + text for text in texts]
    block = b"".join(
        b"\0" + name + value for name, value in zip(sized[::2], sized[1::2], strict=True)
    )
    return frame(_HEADERS, block, flags=_END_HEADERS, stream=stream)


def rapid_resets(path: str, count: int) -> Iterable[bytes]:
    """`count` calls, each cancelled by the frame after the one that began it."""
    for stream in range(1, 2 * count, 2):
        yield call_headers(path, stream) + frame(
            _RST_STREAM, _CANCEL.to_bytes(4, "big"), stream=stream
        )


def pings(count: int) -> Iterable[bytes]:
    """`count` PING frames, all of which the server must acknowledge."""
    return (frame(_PING, number.to_bytes(8, "big")) for number in range(count))


def settings(count: int) -> Iterable[bytes]:
    """`count` SETTINGS frames, all of which the server must acknowledge."""
    return (frame(_SETTINGS) for _ in range(count))


async def flood(address: Address, frames: Iterable[bytes], *, batch: int = 100) -> str:
    """Sends frames as fast as the server reads them: "all sent", or "closed" by the server
    before."""
    async with connected(address) as (reader, writer):
        drain = asyncio.create_task(is_closed(reader, 3600.0))
        try:
            writer.write(OPENING)
            held: list[bytes] = []
            for one in frames:
                held.append(one)
                if len(held) == batch:
                    writer.write(b"".join(held))
                    held.clear()
                    await writer.drain()
                if drain.done():
                    return "closed"
            writer.write(b"".join(held))
            await writer.drain()
            return "all sent"
        except OSError:
            return "closed"
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
