"""Reads the body of a request, with limits of its size, of its time, and of the memory of all
bodies.
"""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive

from serving.errors import Code, ServiceError, invalid, too_large

_SECONDS = 60.0
_SMALL = 64 << 10
"""Bytes up to which a body does not count in `BodyMemory`, so that it is never refused for other
bodies.
"""


class Gone(Exception):
    """The client has left before its request was complete."""


class BodyMemory:
    """Counts the bytes of all large bodies that are not parsed yet.

    Args:
      most: most bytes; a body that would exceed it is refused.
      on_free: called with the size in bytes of each body that is freed.
    """

    def __init__(self, most: int, on_free: Callable[[int], None] = lambda num_bytes: None):
        self._most, self._on_free, self.num_bytes = most, on_free, 0

    def grow(self, num_bytes: int) -> None:
        """Adds bytes.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED; the limit would be exceeded.
        """
        if self.num_bytes + num_bytes > self._most:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "too many large requests are arriving; try again later",
                retry_after=1.0,
            )
        self.num_bytes += num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Subtracts bytes that have been freed."""
        if num_bytes:
            self.num_bytes -= num_bytes
            self._on_free(num_bytes)


class Body:
    """One body.

    Attributes:
      content: the whole body, after `read`.
    """

    def __init__(self, memory: BodyMemory):
        self._memory, self._counted = memory, 0
        self.content = b""

    async def read(self, headers: Headers, receive: Receive, most: int) -> None:
        """Reads the whole body.

        Raises:
          ServiceError: the body is longer than `most` bytes, takes too long, has another content
            type than JSON, or exceeds the memory of all bodies.
          Gone: the client has left.
        """
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers let any page send other types to a server on the same machine.
            raise invalid("content-type", "must be application/json")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise invalid("content-encoding", "is not supported: send the body as it is")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large("body", most)
        try:
            async with asyncio.timeout(_SECONDS):
                self.content = await self._whole(receive, most)
        except TimeoutError as error:
            text = f"the request did not come whole within {_SECONDS:g} s"
            raise ServiceError(Code.DEADLINE_EXCEEDED, text) from error

    def free(self) -> None:
        """Frees the content; further calls do nothing."""
        counted, self._counted, self.content = self._counted, 0, b""
        self._memory.shrink(counted)

    async def _whole(self, receive: Receive, most: int) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            if len(body) > most:
                raise too_large("body", most)
            if len(body) > _SMALL:
                self._memory.grow(len(body) - self._counted)
                self._counted = len(body)
            if not message.get("more_body"):
                return bytes(body)
