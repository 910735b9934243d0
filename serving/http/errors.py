"""Errors as OpenAI's clients expect them: a status and a JSON object."""

import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import Response

from serving import turns
from serving.errors import Code, PromptTooLong, ServiceError
from serving.turns import Later

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.CANCELLED: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""As gateways map gRPC's status codes. All other codes are 500."""
_TOO_LARGE = 413
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class _LongError(Exception):
    """The content has a long `Later`, which must be encoded in pieces."""


def dump(content: object) -> bytes:
    """JSON; halves of surrogate pairs, which UTF-8 cannot hold, become question marks."""
    return _ENCODER.encode(content).encode("utf-8", "replace")


async def dump_in_turns(content: object) -> bytes:
    """As `dump`, but long lists of the type `Later` are created and encoded in pieces,
    see `turns`.
    """
    try:
        return dump(content)
    except _LongError:
        return b"".join([piece async for piece in _pieces(content)])


async def _pieces(content: object) -> AsyncIterator[bytes]:
    match content:
        case dict():
            mark = b"{"
            for key, value in content.items():
                yield mark + dump(key) + b":"
                async for piece in _pieces(value):
                    yield piece
                mark = b","
            yield b"}" if content else b"{}"
        case list():
            mark = b"["
            for value in content:
                yield mark
                async for piece in _pieces(value):
                    yield piece
                mark = b","
            yield b"]" if content else b"[]"
        case Later(is_long=True):
            mark = b"["
            async for some in turns.pieces(content):
                yield mark + dump(some)[1:-1]
                mark = b","
            yield b"]"
        case _:
            yield dump(content)


def _all_of(value: object) -> list:
    if not isinstance(value, Later):
        raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")
    if value.is_long:
        raise _LongError
    return value.all()


_ENCODER = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_all_of
)


def answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(dump(content), status, headers, media_type="application/json")


def content_of(status: int, message: str, *, field: str | None = None, code: str | None = None):
    """OpenAI's error object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def status_of(error: ServiceError) -> int:
    """The HTTP status of an error."""
    return _TOO_LARGE if error.is_too_large else STATUS.get(error.code, 500)


def no_such_model(name: str, model: str) -> ServiceError:
    """NOT_FOUND: a client names another model than `model`."""
    rule = f"The model {name!r} does not exist: this server has {model!r}"
    return ServiceError(Code.NOT_FOUND, rule, field="model", reason="model_not_found")


def error_content(error: ServiceError) -> dict:
    """The object of an error; its `code` is OpenAI's, or the name of `Code` in lower case."""
    code = error.reason or error.code.name.lower()
    return content_of(status_of(error), error.message, field=error.field, code=code)


def error_answer(
    error: ServiceError,
    headers: dict[str, str] | None = None,
    content: Callable[[ServiceError], dict] = error_content,
) -> Response:
    """An error as a whole response, with Retry-After where a retry makes sense."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))  # whole seconds, says RFC 9110
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return answer(content(error), status_of(error), headers)


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
      no_route: the same, from a status and a message: there is no such path, or not for this
        method.
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
