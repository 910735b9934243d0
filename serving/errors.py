"""Outcomes of requests, and the error that ends a request."""

import enum
import logging

from peagle_jax.text.bounded_process import UnavailableError

_log = logging.getLogger(__name__)
_LONGEST = 500
"""Characters of a message: clients accept 8 KiB of trailers, and a message may quote the request.
"""
_LONGEST_FIELD = 200


class Code(enum.Enum):
    """How a request ended.

    The names are those of gRPC's status codes. Each protocol maps them at its edge: `rpc.status` by
    name, `http.errors` by a table.
    """

    OK = enum.auto()
    CANCELLED = enum.auto()
    INVALID_ARGUMENT = enum.auto()
    FAILED_PRECONDITION = enum.auto()
    UNAUTHENTICATED = enum.auto()
    PERMISSION_DENIED = enum.auto()
    NOT_FOUND = enum.auto()
    ALREADY_EXISTS = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()
    UNAVAILABLE = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    INTERNAL = enum.auto()


class ServiceError(Exception):
    """Ends a request with a code other than OK.

    Args:
      code: what kind of error it is.
      message: what is wrong and what to do, in one line.
      field: the request's field that is wrong, in the client's spelling; INVALID_ARGUMENT only.
      retry_after: seconds until a retry makes sense; RESOURCE_EXHAUSTED and UNAVAILABLE only.
      is_too_large: whether HTTP answers with 413.
      reason: OpenAI's name of the error, where its clients look for one.
      longest: characters of the message that are kept.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        is_too_large: bool = False,
        reason: str | None = None,
        longest: int = _LONGEST,
    ):
        super().__init__(shortened(message, longest))
        self.code = code
        self.message = shortened(message, longest)
        self.field = None if field is None else shortened(field, _LONGEST_FIELD)
        self.retry_after = retry_after
        self.is_too_large = is_too_large
        self.reason = reason
        self.is_reported = False
        """Whether logs and metrics have counted the error; they count every request once."""

    def of_field(self, field: str) -> "ServiceError":
        """The same error of a field with another name."""
        message = self.message.replace(f"{self.field}: ", f"{field}: ", 1)
        rest = dict(retry_after=self.retry_after, is_too_large=self.is_too_large)
        return ServiceError(self.code, message, field=field, reason=self.reason, **rest)


def invalid(field: str, rule: str) -> ServiceError:
    """INVALID_ARGUMENT: `field` breaks `rule`."""
    return ServiceError(Code.INVALID_ARGUMENT, f"{field}: {rule}", field=field)


class PromptTooLong(ServiceError):
    """INVALID_ARGUMENT: `field` breaks `rule` by its length. Clients look for one of both
    sentences, and shorten the prompt: litellm for the first, langchain for the second.

    Args:
      max_model_len: tokens of prompt and output together.
      excess: the length and the limit, as "9 tokens > 8".
    """

    def __init__(self, field: str, rule: str, *, max_model_len: int, excess: str):
        text = (
            f"This model's maximum context length is {max_model_len} tokens. "
            "The prompt is too long: "
        )
        super().__init__(
            Code.INVALID_ARGUMENT,
            f"{text}{field}: {rule}",
            field=field,
            reason="context_length_exceeded",
        )
        self.excess = excess


def unavailable(error: UnavailableError) -> ServiceError:
    """UNAVAILABLE: a request needs a process that is not there."""
    if error.is_ended:
        return ServiceError(Code.UNAVAILABLE, "the server shuts down; use another server")
    _log.error("%s", error)
    return ServiceError(Code.UNAVAILABLE, str(error), retry_after=1.0)


def too_large(field: str, most: int) -> ServiceError:
    """RESOURCE_EXHAUSTED, over HTTP 413: `field` has more than `most` bytes."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        f"{field}: is larger than the {most} bytes that this server takes",
        field=field,
        is_too_large=True,
    )


def failure(error: Exception) -> ServiceError:
    """INTERNAL: an unexpected exception."""
    text = f"the server failed ({type(error).__name__}); its log says why"
    return ServiceError(Code.INTERNAL, text)


def shortened(text: str, most: int) -> str:
    """`text`, or its first `most` characters.

    Halves of surrogate pairs become question marks: a client's JSON may hold them, protobuf and
    UTF-8 cannot.
    """
    short = text if len(text) <= most else f"{text[: most - 4]} ..."
    return short.encode("utf-8", "replace").decode()
