"""The body of a request: bounded in size and in time."""

import asyncio

import grpc
from starlette.datastructures import Headers
from starlette.types import Receive

from serving.errors import ServiceError, invalid

_SECONDS = 60.0


class Gone(Exception):
    """The client left before its request was complete."""


async def read_body(headers: Headers, receive: Receive, most: int) -> bytes:
    """The whole body.

    Raises:
      ServiceError: INVALID_ARGUMENT; it is longer than `most` bytes, comes too slowly, or is said to be
        no JSON.
      Gone: nobody waits for an answer.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers let any page send other types to a server on the same machine.
        raise invalid("content-type", "must be application/json")
    too_long = invalid("body", f"is longer than the {most} bytes that this server accepts")
    if headers.get("content-length", "").isdecimal() and int(headers["content-length"]) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > most:
                    raise too_long
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError as error:
        text = f"the request did not come whole within {_SECONDS:g} s"
        raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, text) from error
