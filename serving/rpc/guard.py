"""Interceptor of every call: it checks tokens and message limits, and maps exceptions
to statuses.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving import caller
from serving.bearer_tokens import AdminToken, token_of
from serving.errors import Code, ServiceError, failure, invalid, too_large
from serving.rpc.wire import Excess, WireLimits, find_excess

_log = logging.getLogger(__name__)
_OPEN = "/grpc.health.v1.Health/"
CONTROL = "peagle.v1.Control"
"""The service of callers with the admin scope."""
_MESSAGE_SECONDS = 60.0  # from the headers of a call to the end of its request

Report = Callable[[ServiceError], None]


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """Limits of a request message, checked before it is parsed.

    Args:
      max_bytes: bytes of a message of the methods in `large`.
      large: "/package.Service/Method" of methods whose requests carry prompts.
      max_small_bytes: bytes of a message of all other methods.
      wire: limits of fields and numbers.
      names: the clients' names of lists of numbers, by path, where they differ from the path.
      on_read: called with the size in bytes of each message.
    """

    max_bytes: int
    large: Collection[str]
    max_small_bytes: int = 512 << 10  # Abort: 1024 ids of 256 characters, and more
    wire: WireLimits
    names: Mapping[str, str] = field(default_factory=dict)
    on_read: Callable[[int], None] = lambda num_bytes: None

    def of(self, method: str) -> int:
        """Most bytes of a message of a method."""
        return self.max_bytes if method in self.large else min(self.max_small_bytes, self.max_bytes)


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without a token, and ends a call with the status of the exception that it
    raised.

    Args:
      tokens: bearer tokens, read again for every call; if empty, no token is needed.
      limits: see `MessageLimits`.
      on_refused: called with the method and the error of each call that raised `ServiceError`,
        health checks excepted.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        limits: MessageLimits,
        on_refused: Callable[[str, ServiceError], None],
    ):
        self._tokens, self._limits, self._on_refused = tokens, limits, on_refused

    async def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails):
        handler = await continuation(details)
        if handler is None:
            return handler
        headers = [value for key, value in details.invocation_metadata if key == "authorization"]
        token = token_of(headers, self._tokens)
        if self._tokens and token is None and not details.method.startswith(_OPEN):
            behaviour, read = _refuse, _read_nothing
            if handler.response_streaming:
                behaviour = _refuse_stream
        elif details.method.startswith(f"/{CONTROL}/") and not isinstance(token, AdminToken):
            behaviour, read = _refuse_caller, _read_nothing
        else:
            behaviour = _behaviour(handler)
            read = _reader(handler, self._limits, self._limits.of(details.method))
        guarded = _guarded_stream if handler.response_streaming else _guarded
        report = partial(self._on_refused, details.method.removeprefix("/"))
        if details.method.startswith(_OPEN):
            report = _ignore  # a probe is no request
        return _rebuilt(handler, guarded(behaviour, read, report, token))


def _behaviour(handler: grpc.RpcMethodHandler) -> Callable:
    if handler.response_streaming:
        return handler.stream_stream or handler.unary_stream
    return handler.stream_unary or handler.unary_unary


def _reader(handler: grpc.RpcMethodHandler, limits: MessageLimits, max_bytes: int) -> Callable:
    """A function that turns the bytes of a call into its message or messages.

    gRPC's own deserialization answers UNKNOWN to invalid bytes, logs a traceback for each, and also
    reads messages of clients without a token.
    """
    descriptor = handler.request_deserializer.__self__.DESCRIPTOR

    def read(data: bytes) -> Message:
        limits.on_read(len(data))
        if len(data) > max_bytes:
            raise too_large("the request", max_bytes)
        if excess := find_excess(data, descriptor, limits.wire):
            raise _refusal(excess, limits.names)
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                f"the request is no such message, or holds text that is not UTF-8 ({error})",
            ) from error

    async def read_one(stream: AsyncIterator[bytes]) -> Message:
        try:
            # If it stays open, gRPC's iterator keeps the message until a garbage collection.
            async with (
                asyncio.timeout(_MESSAGE_SECONDS),
                contextlib.aclosing(aiter(stream)) as messages,
            ):
                data = await anext(messages, None)
        except TimeoutError as error:
            text = f"the request did not come whole within {_MESSAGE_SECONDS:g} s"
            raise ServiceError(Code.DEADLINE_EXCEEDED, text) from error
        if data is None:
            raise ServiceError(Code.INVALID_ARGUMENT, "the call holds no request")
        return read(data)

    async def read_all(stream: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        return _Messages(stream, read)

    return read_all if handler.request_streaming else read_one


class _Messages:
    """Messages of a call that streams its requests.

    A message that is refused raises `ServiceError`, and the next `anext` reads on: a service may
    answer the error within its stream.
    """

    def __init__(self, stream: AsyncIterator[bytes], read: Callable[[bytes], Message]):
        self._stream, self._read = aiter(stream), read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        return self._read(await anext(self._stream))


def _refusal(excess: Excess, names: Mapping[str, str]) -> ServiceError:
    if excess.path:
        rule = f"{excess.num_bytes} bytes are more than {excess.most} numbers take"
        return invalid(names.get(excess.path, excess.path), rule)
    return ServiceError(
        Code.INVALID_ARGUMENT,
        f"the request holds more than the {excess.most} fields that this server takes",
    )


def _guarded(behaviour: Callable, read: Callable, report: Report, token: bytes | None) -> Callable:
    async def call(requests, context):
        caller.enter(token)
        try:
            return await behaviour(await read(requests), context)
        except Exception as error:
            status = _status_of(error, report)
        await abort(context, status)

    return call


def _guarded_stream(
    behaviour: Callable, read: Callable, report: Report, token: bytes | None
) -> Callable:
    async def call(requests, context):
        caller.enter(token)
        try:
            async with contextlib.aclosing(behaviour(await read(requests), context)) as answers:
                async for message in answers:
                    yield message
            return
        except Exception as error:
            status = _status_of(error, report)
        await abort(context, status)

    return call


def _status_of(error: Exception, report: Report) -> ServiceError:
    """The error for the client, without tracebacks.

    gRPC keeps the exception that ends a call until a garbage collection. The frames of its
    traceback would keep the message alive: some dozens of refused messages of 8 MiB would fill
    gigabytes.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ServiceError):
        report(error)
        status = error
    else:
        _log.exception("a call failed", exc_info=error)
        status = failure(error)
    status.__traceback__ = status.__context__ = status.__cause__ = None
    return status


def _ignore(error: ServiceError) -> None:
    """Does not report an error."""


async def _read_nothing(stream: AsyncIterator[bytes]) -> None:
    """Does not read the messages of a client without a token."""


async def _refuse(request, context):
    raise ServiceError(
        Code.UNAUTHENTICATED, "send one known token as metadata: authorization: Bearer TOKEN"
    )


async def _refuse_caller(request, context):
    caller.check_admin()


async def _refuse_stream(request, context):
    yield await _refuse(request, context)


def _rebuilt(handler: grpc.RpcMethodHandler, behaviour: Callable) -> grpc.RpcMethodHandler:
    """The handler with another behaviour, which takes a stream of bytes.

    Methods with a single request take a stream too: otherwise gRPC waits for the whole request,
    without a time limit, before the behaviour can refuse the call.
    """
    responses = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"stream_{responses}_rpc_method_handler")
    return make(behaviour, None, handler.response_serializer)


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """Ends a call with the error's status. `Code` has the names of gRPC's status codes."""
    message = error.message
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=message)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(int(1000 * error.retry_after))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    await context.abort_with_status(rpc_status.to_status(status))
