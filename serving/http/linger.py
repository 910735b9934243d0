"""Closes a connection without losing its last answer.

Where a socket is closed while bytes of the client are unread, the kernel resets the connection, and the
client may lose an answer that it has not read yet. So the sending side is shut down first, what still
comes is discarded, and then the socket is closed (RFC 9112, section 9.6).
"""

import asyncio
from collections.abc import Callable

_MOST = 64 << 20  # bytes that are discarded


class LingeringTransport:
    """A transport whose `close` waits for the client's end where the client may still be sending.

    Everything else goes to the transport within.

    Args:
      transport: of the connection.
      is_client_sending: says at `close` whether bytes of the client may be unread or on their way.
      seconds: from `close` to the end at the latest.

    Attributes:
      is_lingering: whether the server has said its last, and discards what comes.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        is_client_sending: Callable[[], bool],
        *,
        seconds: float,
    ):
        self._transport, self._is_client_sending = transport, is_client_sending
        self._seconds = seconds
        self._left = _MOST
        self._timer: asyncio.TimerHandle | None = None
        self.is_lingering = False

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Sends what is buffered, then closes: at once if the client is not sending."""
        if self.is_closing():
            return
        if not self._is_client_sending():
            self._transport.close()
            return
        self.is_lingering = True
        if self._transport.can_write_eof():  # not with TLS, which has no half of a connection
            self._transport.write_eof()
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._transport.close)

    def discard(self, num_bytes: int) -> None:
        """Counts bytes that came meanwhile; too many end the connection."""
        self._left -= num_bytes
        if self._left < 0:
            self._transport.close()

    def lost(self) -> None:
        """Says that the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
