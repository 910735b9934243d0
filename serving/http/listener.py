"""Accepts HTTP connections within limits, also when the process has no file descriptor left."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from serving.http.gate import Gate, Slot

_log = logging.getLogger(__name__)
# Connections opened in one turn of the event loop. Those that were closed to make room keep their
# descriptors for some turns.
_AT_ONCE = 16
_MOST_DEAD = 256  # connections that their client has reset already, dropped in one turn
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.1  # seconds without accepting after the system had no descriptor for a connection


class Listener:
    """Accepts connections until it is closed.

    asyncio's own server has no limit of connections, and logs every failed accept, up to `backlog`
    in one turn of the event loop.

    Args:
      listener: a listening socket in non-blocking mode.
      make_protocol: makes the protocol of a connection.
      context: called for each connection; None serves without TLS.
      gate: limits of connections.
      handshake_seconds: limit of the TLS handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Slot], asyncio.Protocol],
        *,
        context: Callable[[], ssl.SSLContext] | None,
        gate: Gate,
        handshake_seconds: float,
    ):
        self._socket, self._make_protocol, self._context = listener, make_protocol, context
        self._gate, self._handshake_seconds = gate, handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task] = set()
        self._is_closed = False
        self._listen()

    def close(self) -> None:
        """Accepts no more connections, and closes those whose handshake has not ended."""
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when no handshake is left."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        num_opened = num_dead = 0
        while num_opened < _AT_ONCE and num_dead < _MOST_DEAD:
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                # The socket stays readable: without a pause the event loop would only repeat
                # accept.
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE, self._listen)
                closed = "closed the oldest idle one" if self._gate.close_idle() else "none is idle"
                _log.warning("cannot accept a connection (%s); %s", error.strerror, closed)
                return
            connection.setblocking(False)
            if _is_reset(connection):
                connection.close()
                num_dead += 1
            else:
                self._admit(connection, str(address[0]))
                num_opened += 1

    def _admit(self, connection: socket.socket, address: str) -> None:
        slot = self._gate.enter(address, connection.close)
        if slot is None:
            connection.close()
            _log.warning("refused a connection: %d are open", self._gate.num_open)
            return
        if slot.is_reserved:
            _log.warning(
                "%d connections are open: answering health checks only", self._gate.num_open
            )
        with_tls = self._context is not None
        opening = self._loop.connect_accepted_socket(
            lambda: self._make_protocol(slot),
            connection,
            ssl=self._context() if with_tls else None,
            ssl_handshake_timeout=self._handshake_seconds if with_tls else None,
            ssl_shutdown_timeout=self._handshake_seconds if with_tls else None,
        )
        # The task ends with the handshake; then the protocol owns the connection.
        task = self._loop.create_task(opening)
        slot.close = task.cancel
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, connection, slot))

    def _opened(self, connection: socket.socket, slot: Slot, task: asyncio.Task) -> None:
        self._opening.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        self._gate.leave(slot)
        connection.close()
        if not isinstance(error, OSError | asyncio.CancelledError):
            _log.error("a connection could not be opened", exc_info=error)


def _is_reset(connection: socket.socket) -> bool:
    """Whether the client has reset the connection. This takes 2 us, opening and closing
    one 150 us.
    """
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False
