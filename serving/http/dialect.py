"""How the HTTP APIs differ in their errors and in the form of their events."""

from collections.abc import Callable
from dataclasses import dataclass

from serving.errors import PromptTooLong, ServiceError
from serving.http.errors import content_of, error_content, status_of

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Clients that read it send the whole conversation instead."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API.

    Args:
      error: the content of an answer that is an error.
      no_route: the same, from a status and a message: there is no such path, or not for this method.
      error_event: the content of an event that ends a stream.
      names_events: whether an event has a line with its name, the "type" of its content.
      last_event: data of an event that ends every stream; None without one.
      id_header: a further header with the request's id; None without one.
    """

    error: Callable[[ServiceError], dict]
    no_route: Callable[[int, str], dict]
    error_event: Callable[[ServiceError], dict]
    names_events: bool = False
    last_event: bytes | None = None
    id_header: str | None = None


def _anthropic_content(status: int, message: str) -> dict:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _anthropic_error(error: ServiceError) -> dict:
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.excess} maximum"
    content = _anthropic_content(status_of(error), message)
    if error.field == "thread":
        content["error"]["details"] = _NO_THREADS
    return content


def _response_error(error: ServiceError) -> dict:
    content = error_content(error)["error"]
    return {"type": "error"} | {name: content[name] for name in ("code", "message", "param")}


OPENAI = Dialect(
    error=error_content, no_route=content_of, error_event=error_content, last_event=b"[DONE]"
)
ANTHROPIC = Dialect(
    error=_anthropic_error,
    no_route=_anthropic_content,
    error_event=_anthropic_error,
    names_events=True,
    id_header="request-id",
)
RESPONSES = Dialect(
    error=error_content, no_route=content_of, error_event=_response_error, names_events=True
)


def dialect_of(path: str) -> Dialect:
    """The API that a path belongs to."""
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI
