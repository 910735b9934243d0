"""Errors as OpenAI's clients expect them: a status and a JSON object."""

import json
import math

import grpc
from starlette.responses import Response

from serving.errors import ServiceError

STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.CANCELLED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""The map of the gateways that translate gRPC; what is not here is 500."""
_TOO_LARGE = 413
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def dump(content: object) -> bytes:
    """JSON; halves of surrogate pairs, which UTF-8 cannot hold, become question marks."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


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


def error_content(error: ServiceError) -> dict:
    """An error's object; its `code` is the gRPC status."""
    status = status_of(error)
    return content_of(status, error.message, field=error.field, code=error.code.name.lower())


def error_answer(error: ServiceError, headers: dict[str, str] | None = None) -> Response:
    """An error as a whole response, with Retry-After where a retry makes sense."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))  # whole seconds, says RFC 9110
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return answer(error_content(error), status_of(error), headers)
