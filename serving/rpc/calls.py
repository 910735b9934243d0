"""What all gRPC servicers take from a call (id, deadline, trace) and tell it first."""

import contextlib
import time
import uuid

import grpc

from serving.errors import invalid

_MAX_ID = 256
_TRACE = ("traceparent", "tracestate")


def request_id(given: str, *, field: str = "request_id") -> str:
    """The client's id, or a new one.

    Raises:
      ServiceError: it is too long.
    """
    if len(given) > _MAX_ID:
        raise invalid(field, f"{len(given)} characters are more than {_MAX_ID}")
    return given or uuid.uuid4().hex


def deadline(context: grpc.aio.ServicerContext) -> float | None:
    """`time.monotonic()` at which the client's deadline passes; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def trace(context: grpc.aio.ServicerContext) -> dict[str, str]:
    """Headers of the client's trace (W3C)."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if key in _TRACE and isinstance(value, str)}


async def accepted(context: grpc.aio.ServicerContext, request_id: str) -> None:
    """Tells the client that its request was accepted, and under which id: from here on a server that
    drains lets it end."""
    # Where it fails the client has gone, and the call is about to be cancelled.
    with contextlib.suppress(grpc.aio.InternalError):
        await context.send_initial_metadata((("x-request-id", _ascii_only(request_id)),))


def _ascii_only(text: str) -> str:
    """`text` as metadata may hold it: what is not printable ASCII becomes a question mark."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
