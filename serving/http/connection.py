"""One HTTP connection: uvicorn's protocol with time limits.

Without them a client that is silent, sends a head byte by byte, or does not read its answer could
hold the connection for any time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import h11
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from serving.http.errors import content_of, dump
from serving.http.gate import Gate, Slot

_MOST_DISCARDED = 64 << 20  # most bytes that are discarded


class LingeringTransport:
    """A transport whose `close` waits until the client has sent its request.

    If a socket is closed while bytes of the client are unread, the kernel resets the connection,
    and the client may lose an answer that it has not read. So the sending side is shut down first,
    bytes that still arrive are discarded, and then the socket is closed (RFC 9112, section 9.6).

    All other attributes are those of the wrapped transport.

    Args:
      transport: transport of the connection.
      is_client_sending: whether the client may still send bytes of its request; called by `close`.
      seconds: longest time from `close` to the end.

    Attributes:
      is_lingering: whether the last answer is sent, and received bytes are discarded.
    """

    def __init__(
        self, transport: asyncio.Transport, is_client_sending: Callable[[], bool], *, seconds: float
    ):
        self._transport, self._is_client_sending = transport, is_client_sending
        self._seconds = seconds
        self._left = _MOST_DISCARDED
        self._timer: asyncio.TimerHandle | None = None
        self.is_lingering = False

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Sends buffered bytes, then closes: at once if the client is not sending."""
        if self.is_closing():
            return
        if not self._is_client_sending():
            self._transport.close()
            return
        self.is_lingering = True
        if self._transport.can_write_eof():  # TLS cannot close one direction alone
            self._transport.write_eof()
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._transport.close)

    def discard(self, num_bytes: int) -> None:
        """Counts discarded bytes; too many close the connection."""
        self._left -= num_bytes
        if self._left < 0:
            self._transport.close()

    def lost(self) -> None:
        """Cancels the timer after the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()


RESERVED = "is_reserved"
"""Key in the state of the ASGI scope: whether this connection is for health checks only."""
WRITE = "write"
"""Key in the same state: `Connection.write_chunk` of this request; missing if its answer has no
chunks (HTTP/1.0).
"""
_CLOSE = (b"connection", b"close")
_HTTP2 = b"PRI * HTTP/2.0\r\n"


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Time limits of a client, in seconds.

    Args:
      head: from the connection, or from the first byte of a further request, to the end of the
        head; also the limit of the TLS handshake.
      write: longest time without reading while the server has data to send.
      linger: how long the rest of a request is discarded after the last answer.
    """

    head: float = 10.0
    write: float = 30.0
    linger: float = 10.0


class Connection(H11Protocol):
    """Speaks HTTP/1.1 with one client."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        *,
        gate: Gate,
        slot: Slot,
        time_limits: TimeLimits,
    ):
        super().__init__(config, server_state, {RESERVED: slot.is_reserved})
        self._gate, self._slot, self._time_limits = gate, slot, time_limits
        self._waiting_for_head: asyncio.TimerHandle | None = None
        self._waiting_for_reader: asyncio.TimerHandle | None = None
        self._is_refusing = False
        self._app, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:
        lingering = LingeringTransport(
            transport, self._is_client_sending, seconds=self._time_limits.linger
        )
        super().connection_made(lingering)
        self._write = transport.write
        self._slot.close = transport.abort
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self._slot)
        _cancel(self._waiting_for_head)
        _cancel(self._waiting_for_reader)
        self.transport.lost()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_lingering:
            self.transport.discard(len(data))
            return
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        """Checks a head before the parser reads it."""
        if self.conn.their_state is h11.IDLE:
            if self.cycle is None and self.conn.trailing_data[0].startswith(_HTTP2):
                # No GOAWAY of HTTP/2: gRPC takes it for a server that restarts, and connects again
                # without a pause.
                self._refuse(400, "this port speaks HTTP/1.1; gRPC and HTTP/2 are for --port")
                return
            fault = find_fault(self.conn.trailing_data[0])
            if fault is not None:
                self._refuse(400, f"{fault} (RFC 9112)")
                return
        before = self.cycle
        super().handle_events()
        if self._slot.is_reserved and self.cycle is not before:
            self.scope["headers"].append(_CLOSE)  # a reserved connection serves one request

    def send_400_response(self, msg: str) -> None:
        """Called when the parser refuses the request."""
        self._refuse(400, msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            _cancel(self._waiting_for_reader)
            self._waiting_for_reader = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application. An answer that does not wait for the body closes the connection.

        The rest of the body could be long, and the client must not send its next request after it.
        """

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_client_sending():
                headers = [*message.get("headers", ()), _CLOSE]
                message = {**message, "headers": headers}
            await send(message)

        if scope["http_version"] == "1.1":
            scope["state"][WRITE] = partial(self.write_chunk, self.cycle)
        await self._app(scope, receive, send_and_close)

    def write_chunk(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Sends a piece, not empty, of an answer that has begun and has no length, without the
        layers of `send`.

        Returns:
          False if nothing was sent: `send` must do it, which waits for a slow reader and knows a
            lost client.
        """
        is_open = not (cycle.disconnected or cycle.response_complete or self.transport.is_closing())
        if not is_open or self.flow.write_paused:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _is_client_sending(self) -> bool:
        return self._is_refusing or self.conn.their_state is h11.SEND_BODY

    def _watch_head(self) -> None:
        """Starts or stops the timer for the head of the next request, after each change
        of state.
        """
        is_busy = self.cycle is not None and not self.cycle.response_complete
        self._gate.set_idle(self._slot, not is_busy)
        has_begun = self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])
        if is_busy or not has_begun or self.transport.is_closing():
            _cancel(self._waiting_for_head)
            self._waiting_for_head = None
        elif self._waiting_for_head is None:
            self._waiting_for_head = self.loop.call_later(
                self._time_limits.head, self._head_is_late
            )

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0]:
            text = f"the head of the request did not come within {self._time_limits.head:g} s"
            self._refuse(408, text)
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answers an invalid request, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [(b"content-type", b"application/json"), _CLOSE]
            response = h11.Response(status_code=status, headers=headers)
            body = h11.Data(data=dump(content_of(status, message)))
            events = (response, body, h11.EndOfMessage())
            self._close_with(b"".join(map(self.conn.send, events)))
        else:
            self._close_with(b"")

    def _close_with(self, last: bytes) -> None:
        """Sends the last bytes of the connection, and discards what the client still sends."""
        self.transport.write(last)
        self._is_refusing = True
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """Closes the connection unless the client reads the rest of the answer in time."""
        if self._waiting_for_reader is None:
            self._waiting_for_reader = self.loop.call_later(
                self._time_limits.write, self.transport.abort
            )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def find_fault(head: bytes) -> str | None:
    """The first fault of a head that the HTTP parser accepts and RFC 9112 forbids; None if it has
    none.

    A proxy may interpret such a head differently, for example as two requests (request smuggling).
    The server refuses it and closes the connection.

    Args:
      head: bytes from the request line on. The head may be incomplete, or followed by other bytes.
    """
    end = head.find(b"\r\n\r\n")
    lines = (head if end < 0 else head[:end]).split(b"\n")
    for line in lines[:-1]:
        if not line.endswith(b"\r"):
            return "a line of the head ends without a carriage return"
    # The last line may be incomplete: it may end between \r and \n.
    for line in lines:
        if b"\r" in line.removesuffix(b"\r"):
            return "a line of the head has a carriage return inside"
    if any(line[:1] in (b" ", b"\t") for line in lines[1:]):
        return "a header goes on in a second line"
    names = {line.partition(b":")[0].strip().lower() for line in lines[1:]}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            return "Content-Length and Transfer-Encoding exclude each other"
        if lines[0].rstrip(b"\r").endswith(b"HTTP/1.0"):
            return "HTTP/1.0 has no Transfer-Encoding"
    return None
