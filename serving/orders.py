"""What ends a process that serves clients: signals in the first one, and its orders in the others."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.frames import Channel, ClosedError, encode

_log = logging.getLogger(__name__)


class Orders(Protocol):
    """When and how a process that serves clients ends.

    Attributes:
      stop: set when the process shall drain.
      hurry: set when it shall end open requests at once.
      exit_code: exit code after `hurry`.
      failure: exit code if another process of the server is gone; None if none is.
    """

    stop: asyncio.Event
    hurry: asyncio.Event
    exit_code: int
    failure: int | None


class Siblings:
    """The other processes that serve clients, as the first one sees them.

    Args:
      controls: sockets to them, from process 1 on.
      on_lost: called with the number of a process that ended without an order.
    """

    def __init__(self, controls: Sequence[socket.socket], on_lost: Callable[[int], None]):
        self._channels = {i: Channel(one) for i, one in enumerate(controls, start=1)}
        self._on_lost, self._is_ending = on_lost, False
        self._undrained = set(self._channels)
        self.drained = threading.Event()
        """Set when none of them has an open request."""
        loop = asyncio.get_running_loop()
        for index, channel in self._channels.items():
            channel.connection.setblocking(False)
            loop.add_reader(channel.connection, self._read, index)
        self._settle(None)

    def order(self, *message: object) -> None:
        """Sends an order to all of them."""
        self._is_ending = self._is_ending or message[0] in ("drain", "hurry")
        for channel in self._channels.values():
            try:
                channel.connection.send(encode(message))  # a few bytes: the socket has room
            except OSError:
                _log.debug("a process of the server has ended already")

    def _read(self, index: int) -> None:
        try:
            for kind, *_ in self._channels[index].feed():
                if kind == "drained":
                    self._settle(index)
        except (ClosedError, OSError):
            asyncio.get_running_loop().remove_reader(self._channels[index].connection)
            self._settle(index)
            if not self._is_ending:
                self._on_lost(index)

    def _settle(self, index: int | None) -> None:
        self._undrained.discard(index)
        if not self._undrained:
            self.drained.set()


class OrdersOfFirst:
    """Orders that a further process gets from the first one.

    Args:
      control: a channel to it; its first message has been received.
      on_hangup: called when tokens and certificates shall be read again.
      on_orphaned: called when the first process is gone.
    """

    def __init__(
        self, control: Channel, on_hangup: Callable[[], None], on_orphaned: Callable[[], None]
    ):
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.exit_code = 0
        self.failure: int | None = None
        self._control, self._on_hangup, self._on_orphaned = control, on_hangup, on_orphaned
        control.connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.connection, self._read)
        for message in control.rest():  # read together with one that was received
            self._loop.call_soon(self._handle, message)

    def say(self, *message: object) -> None:
        """Sends a message to the first process."""
        self._control.connection.send(encode(message))

    def _read(self) -> None:
        try:
            messages = self._control.feed()
        except (ClosedError, OSError):
            self._on_orphaned()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: tuple) -> None:
        match message:
            case "drain", failure:
                self.failure = failure
                self.stop.set()
            case "hurry", code:
                self.exit_code = code
                self.hurry.set()
            case ("hangup",):
                self._on_hangup()
