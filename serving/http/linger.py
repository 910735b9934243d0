"""Closes a connection so that the client can read the last answer.

If a socket is closed while bytes of the client are unread, the kernel resets the connection, and the client
may lose an answer that it has not read. So the server first shuts down its sending side, discards the bytes
that still arrive, and then closes the socket (RFC 9112, section 9.6).
"""

import asyncio
from collections.abc import Callable

_MOST = 64 << 20  # most bytes that are discarded


class LingeringTransport:
    """A transport whose `close` waits until the client has sent its request.

    All other attributes are those of the wrapped transport.

    Args:
      transport: transport of the connection.
      is_client_sending: whether the client may still send bytes of its request; called by `close`.
      seconds: longest time from `close` to the end.

    Attributes:
      is_lingering: whether the last answer is sent, and received bytes are discarded.
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
