"""What a client is told when a request does not end well."""

import grpc

_LONGEST = 500
"""Characters of a message: clients take 8 KiB of trailers, and it may quote a request."""
_LONGEST_FIELD = 200


class ServiceError(Exception):
    """A request's terminal status other than OK.

    Args:
      code: gRPC status; HTTP routes translate it.
      message: what happened and what to do, for a person.
      field: the request's field that is wrong, in the client's own spelling; INVALID_ARGUMENT only.
      retry_after: seconds until a retry makes sense; RESOURCE_EXHAUSTED and UNAVAILABLE only.
      is_too_large: whether HTTP answers 413 for it.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        is_too_large: bool = False,
    ):
        super().__init__(shortened(message, _LONGEST))
        self.code = code
        self.message = shortened(message, _LONGEST)
        self.field = None if field is None else shortened(field, _LONGEST_FIELD)
        self.retry_after = retry_after
        self.is_too_large = is_too_large
        self.is_reported = False
        """Whether logs and metrics know of it; every request is reported once."""


def invalid(field: str, rule: str) -> ServiceError:
    """INVALID_ARGUMENT: `field` breaks `rule`."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {rule}", field=field)


def too_large(field: str, most: int) -> ServiceError:
    """RESOURCE_EXHAUSTED, over HTTP 413: `field` has more than `most` bytes."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{field}: is larger than the {most} bytes that this server takes",
        field=field,
        is_too_large=True,
    )


def failure(error: Exception) -> ServiceError:
    """INTERNAL: an exception that nobody expected."""
    text = f"the server failed ({type(error).__name__}); its log says why"
    return ServiceError(grpc.StatusCode.INTERNAL, text)


def shortened(text: str, most: int) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."
