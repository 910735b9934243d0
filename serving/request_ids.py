"""Ids that a client gives its request: the request's own id, and the headers of the
client's trace.
"""

import re
import uuid
from collections.abc import Iterable

from serving.errors import invalid

_MAX_ID = 256  # characters
_TRACE_HEADERS = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
"""Headers of W3C Trace Context, and what is taken: the log has the first one in every line of the
request.
"""


def request_id(given: str, *, field: str = "request_id") -> str:
    """The client's id, or a new one if it gives none.

    Raises:
      ServiceError: INVALID_ARGUMENT; the id is too long, or the headers of an answer cannot hold
        it.
    """
    if not (given.isascii() and given.isprintable()):
        raise invalid(field, "must be printable ASCII")
    if len(given) > _MAX_ID:
        raise invalid(field, f"{len(given)} characters are more than {_MAX_ID}")
    return given or uuid.uuid4().hex


def trace_headers(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Headers of the client's trace, without those that are none.

    Args:
      headers: all of the call; names are lower-case.
    """
    given = [(name, value) for name, value in headers if isinstance(value, str)]
    return {
        name: value
        for name, value in given
        if name in _TRACE_HEADERS and _TRACE_HEADERS[name].fullmatch(value)
    }
