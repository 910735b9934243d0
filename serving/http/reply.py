"""Sends one response: as a whole, or as server-sent events."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.errors import ServiceError
from serving.http.connection import WRITE
from serving.http.errors import Dialect, dump_in_turns, error_answer

_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers the events
}


class Reply:
    """One response. It records whether the response has begun.

    Args:
      dialect: the API of the route.

    Attributes:
      headers: sent with every kind of response.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect):
        self._scope, self._receive, self._send = scope, receive, send
        self._dialect, self._has_begun = dialect, False
        self._write: Callable[[bytes], bool] | None = scope.get("state", {}).get(WRITE)
        self.headers: dict[str, str] = {}

    def set_id(self, request_id: str) -> None:
        """Sets the headers with the request's id."""
        for name in filter(None, ("x-request-id", self._dialect.id_header)):
            self.headers[name] = request_id

    async def whole(self, response: Response) -> None:
        """Sends a response as it is."""
        self._has_begun = True
        await response(self._scope, self._receive, self._send)

    async def content(self, content: dict) -> None:
        """Sends a JSON object."""
        body = await dump_in_turns(content)
        await self.whole(Response(body, headers=self.headers, media_type="application/json"))

    async def event(self, content: dict | bytes) -> None:
        """Sends an event; the first begins the response. Bytes are its JSON, in an API whose events
        have no names.
        """
        if isinstance(content, bytes):
            await self._data(b"data: " + content)
            return
        name = f"event: {content['type']}\n".encode() if self._dialect.names_events else b""
        await self._data(name + b"data: " + await dump_in_turns(content))

    async def end_events(self) -> None:
        """Sends the last event of the API, if it has one, and ends the response."""
        if self._dialect.last_event is not None:
            await self._data(b"data: " + self._dialect.last_event)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def error(self, error: ServiceError, headers: dict[str, str] | None = None) -> None:
        """Sends an error as a response with its status; `headers` are additional."""
        all_headers = self.headers | (headers or {})
        await self.whole(error_answer(error, all_headers, self._dialect.error))

    async def fail(self, error: ServiceError) -> None:
        """Sends an error: as a response with its status, or as an event if the response
        has begun.
        """
        if not self._has_begun:
            await self.error(error)
            return
        await self.event(self._dialect.error_event(error))
        await self.end_events()

    async def _data(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [
                (name.encode("latin-1"), value.encode("latin-1"))
                for name, value in (_EVENT_HEADERS | self.headers).items()
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = data + b"\n\n"
        if self._write is not None and self._write(body):
            return
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
