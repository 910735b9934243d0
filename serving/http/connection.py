"""One HTTP connection: uvicorn's, with limits on what a client may keep it waiting for.

A client that is silent, sends a head byte by byte, or does not read its answer would otherwise hold the
connection for as long as it likes.
"""

import asyncio
from dataclasses import dataclass

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from serving.http.errors import content_of, dump
from serving.http.gate import Gate, Visit
from serving.http.head import fault

RESERVED = "is_reserved"
"""Key of the ASGI scope's state: whether this connection is for health checks only."""
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a client may take, in seconds.

    Args:
      head: from the connection, or the first byte of a further request, to the end of the head; also
        for the TLS handshake.
      write: how long a client may read nothing while the server has something to send.
    """

    head: float = 10.0
    write: float = 30.0


class Connection(H11Protocol):
    """Speaks HTTP/1.1 with one client."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        *,
        gate: Gate,
        visit: Visit,
        patience: Patience,
    ):
        super().__init__(config, server_state, {RESERVED: visit.is_reserved})
        self._gate, self._visit, self._patience = gate, visit, patience
        self._waiting_for_head: asyncio.TimerHandle | None = None
        self._waiting_for_reader: asyncio.TimerHandle | None = None
        self._unread_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol, as for the methods below."""
        super().connection_made(transport)
        self._visit.close = transport.abort
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self._visit)
        _cancel(self._waiting_for_head)
        _cancel(self._waiting_for_reader)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unread_body:
            self._discard(data)
            return
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        """Looks at a head before the parser reads it."""
        if self.conn.their_state is h11.IDLE:
            wrong = fault(self.conn.trailing_data[0])
            if wrong is not None:
                self._refuse(400, f"{wrong} (RFC 9112)")
                return
        before = self.cycle
        super().handle_events()
        if self._visit.is_reserved and self.cycle is not before:
            self.scope["headers"].append(_CLOSE)  # the reserved places are for one request each

    def send_400_response(self, msg: str) -> None:
        """Called when the parser refuses what came."""
        self._refuse(400, msg)

    def on_response_complete(self) -> None:
        # The rest of a body that the answer did not wait for is read before the connection is closed:
        # else the system resets the connection, and the client may lose the answer.
        self._unread_body = self.conn.their_state is h11.SEND_BODY
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

    def _watch_head(self) -> None:
        """Starts or ends the wait for a head, after anything that may have changed it."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        self._gate.set_idle(self._visit, not is_busy)
        has_begun = self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])
        if is_busy or not (has_begun or self._unread_body) or self.transport.is_closing():
            _cancel(self._waiting_for_head)
            self._waiting_for_head = None
        elif self._waiting_for_head is None:
            self._waiting_for_head = self.loop.call_later(self._patience.head, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0] and not self._unread_body:
            text = f"the head of the request did not come within {self._patience.head:g} s"
            self._refuse(408, text)
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answers what is no request, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [(b"content-type", b"application/json"), _CLOSE]
            response = h11.Response(status_code=status, headers=headers)
            body = h11.Data(data=dump(content_of(status, message)))
            for event in (response, body, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        self._abort_later()

    def _discard(self, data: bytes) -> None:
        """Reads the rest of a body that is not needed, and closes the connection after it."""
        self.conn.receive_data(data)
        try:
            while isinstance(event := self.conn.next_event(), h11.Data):
                pass
        except h11.RemoteProtocolError:
            event = None
        if event is not h11.NEED_DATA:
            self.transport.close()
            self._abort_later()

    def _abort_later(self) -> None:
        """Gives the client limited time to take what was written."""
        if self._waiting_for_reader is None:
            self._waiting_for_reader = self.loop.call_later(
                self._patience.write, self.transport.abort
            )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
