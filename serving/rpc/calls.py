"""What all gRPC servicers read from a call (deadline, trace), and what they send first."""

import contextlib
import time

import grpc

from serving.request_ids import trace_headers


def deadline(context: grpc.aio.ServicerContext) -> float | None:
    """`time.monotonic()` at which the client's deadline passes; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def trace(context: grpc.aio.ServicerContext) -> dict[str, str]:
    """Headers of the client's trace."""
    return trace_headers(context.invocation_metadata() or ())


async def accepted(context: grpc.aio.ServicerContext, request_id: str) -> None:
    """Tells the client that its request was accepted, and under which id: from here on a server that
    drains lets it end."""
    # Where it fails the client has gone, and the call is about to be cancelled.
    with contextlib.suppress(grpc.aio.InternalError):
        await context.send_initial_metadata((("x-request-id", _ascii_only(request_id)),))


def _ascii_only(text: str) -> str:
    """`text` as metadata may hold it: what is not printable ASCII becomes a question mark."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
