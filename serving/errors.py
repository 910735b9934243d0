"""What a client is told when a request does not end well."""

import grpc


class ServiceError(Exception):
    """A request's terminal status other than OK.

    Args:
      code: gRPC status; HTTP routes translate it.
      message: what happened and what to do, for a person.
      field: the request's field that is wrong, in the client's own spelling; INVALID_ARGUMENT only.
      retry_after: seconds until a retry makes sense; RESOURCE_EXHAUSTED and UNAVAILABLE only.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.is_reported = False
        """Whether logs and metrics know of it; every request is reported once."""


def invalid(field: str, rule: str) -> ServiceError:
    """INVALID_ARGUMENT: `field` breaks `rule`."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {rule}", field=field)


def failure(error: Exception) -> ServiceError:
    """INTERNAL: an exception that nobody expected."""
    text = f"the server failed ({type(error).__name__}); its log says why"
    return ServiceError(grpc.StatusCode.INTERNAL, text)
