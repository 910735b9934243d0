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
    """Sends the id of an accepted request to the client. A draining server lets accepted requests end."""
    # It fails if the client has left; the call is then cancelled.
    with contextlib.suppress(grpc.aio.InternalError):
        await context.send_initial_metadata((("x-request-id", _ascii_only(request_id)),))


def _ascii_only(text: str) -> str:
    """`text` with a question mark for each character that metadata cannot hold."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)
