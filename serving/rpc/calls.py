"""Metadata of gRPC calls: deadline and trace of the client, and the first metadata of
the answer.
"""

import contextlib
import time
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message

from peagle_jax.structured import Structured
from serving import params
from serving.request_ids import trace_headers

SALT = "x-cache-salt"
"""Metadata key: requests with different salts share no cached prefix."""


def deadline(context: grpc.aio.ServicerContext) -> float | None:
    """`time.monotonic()` at which the client's deadline passes; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def trace(context: grpc.aio.ServicerContext) -> dict[str, str]:
    """Headers of the client's trace."""
    return trace_headers(context.invocation_metadata() or ())


def cache_salt(context: grpc.aio.ServicerContext) -> str | None:
    """The client's salt of the prefix cache, in protocols that have no field for it.

    Raises:
      ServiceError: INVALID_ARGUMENT; it is empty or too long.
    """
    salt = dict(context.invocation_metadata() or ()).get(SALT)
    return None if salt is None else params.cache_salt(salt, field=SALT)


def address(context: grpc.aio.ServicerContext) -> str:
    """The client's network address; "" if it has none, as on a Unix socket."""
    kind, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def constraint_of(message: Message, part: str) -> tuple[str, Structured | None]:
    """The field of a message's constraint, and the constraint.

    Args:
      part: path of the message in the request.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the field.
    """
    kind = message.WhichOneof("constraint")
    field, value = f"{part}.{kind}", kind and getattr(message, kind)
    if isinstance(value, Message):  # a list of texts
        value = [text for _, texts in value.ListFields() for text in texts]
    return field, params.constraint(field, kind, value)


async def accepted(context: grpc.aio.ServicerContext, request_id: str) -> None:
    """Sends the id of an accepted request to the client. A draining server lets accepted requests
    end.
    """
    # It fails if the client has left; the call is then cancelled.
    with contextlib.suppress(grpc.aio.InternalError):
        await context.send_initial_metadata((("x-request-id", request_id),))
