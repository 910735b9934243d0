"""Ids that a client gives its request: the request's own id, and the headers of the client's trace."""

import uuid
from collections.abc import Iterable

from serving.errors import invalid

_MAX_ID = 256  # characters
_TRACE_HEADERS = ("traceparent", "tracestate")


def request_id(given: str, *, field: str = "request_id") -> str:
    """The client's id, or a new one if it gives none.

    Raises:
      ServiceError: INVALID_ARGUMENT; the id is too long, or the headers of an answer cannot hold it.
    """
    if not (given.isascii() and given.isprintable()):
        raise invalid(field, "must be printable ASCII")
    if len(given) > _MAX_ID:
        raise invalid(field, f"{len(given)} characters are more than {_MAX_ID}")
    return given or uuid.uuid4().hex


def trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Headers of the client's trace (W3C Trace Context).

    Args:
      headers: all of the call; names are lower-case.
    """
    return {
        name: value for name, value in headers if name in _TRACE_HEADERS and isinstance(value, str)
    }
