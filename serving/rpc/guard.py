"""What surrounds every call: authentication, limits of messages, exceptions that become statuses."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import grpc
from google.protobuf.message import DecodeError, Message

from serving import caller
from serving.bearer_tokens import token_of
from serving.errors import Code, ServiceError, failure, invalid, too_large
from serving.rpc.status import abort
from serving.rpc.wire import Excess, WireLimits, excess

_log = logging.getLogger(__name__)
_OPEN = "/grpc.health.v1.Health/"
_MESSAGE_SECONDS = 60.0  # from the head of a call to the end of its request

Report = Callable[[ServiceError], None]


@dataclass(frozen=True, kw_only=True)
class MessageLimits:
    """What a request's message may hold; looked at before it is parsed.

    Args:
      max_bytes: of calls in `large`.
      large: "/package.Service/Method" of calls that carry prompts.
      max_small_bytes: of all others.
      wire: fields and numbers.
      names: of lists of numbers that clients know by another name than their path.
      on_read: called with the bytes of each message.
    """

    max_bytes: int
    large: Collection[str]
    max_small_bytes: int = 512 << 10  # Abort: 1024 ids of 256 characters, and more
    wire: WireLimits
    names: Mapping[str, str] = field(default_factory=dict)
    on_read: Callable[[int], None] = lambda num_bytes: None

    def of(self, method: str) -> int:
        """Bytes of a message."""
        return self.max_bytes if method in self.large else min(self.max_small_bytes, self.max_bytes)


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without a token, and gives every exception of a servicer its status.

    Args:
      tokens: bearer tokens, looked at anew for every call; empty lets everybody in.
      limits: see `MessageLimits`.
      on_refused: called with the method and the error of a call that did not end well.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        limits: MessageLimits,
        on_refused: Callable[[str, ServiceError], None],
    ):
        self._tokens, self._limits, self._on_refused = tokens, limits, on_refused

    async def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails):
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None:
            return handler
        metadata = dict(details.invocation_metadata)
        token = token_of(metadata.get("authorization"), self._tokens)
        if self._tokens and token is None and not details.method.startswith(_OPEN):
            behaviour, read = _nobody, _nothing
            if handler.response_streaming:
                behaviour = _nobody_streams
        else:
            behaviour = _behaviour(handler)
            read = _reader(handler, self._limits, self._limits.of(details.method))
        guarded = _guarded_stream if handler.response_streaming else _guarded
        report = partial(self._on_refused, details.method.removeprefix("/"))
        return _rebuilt(handler, guarded(behaviour, read, report, token))


def _behaviour(handler: grpc.RpcMethodHandler) -> Callable:
    if handler.response_streaming:
        return handler.stream_stream or handler.unary_stream
    return handler.stream_unary or handler.unary_unary


def _reader(handler: grpc.RpcMethodHandler, limits: MessageLimits, max_bytes: int) -> Callable:
    """What makes a call's message, or messages, of bytes. gRPC's own would answer UNKNOWN to bytes that
    are no message, log a traceback for each, and read those of clients without a token."""
    descriptor = handler.request_deserializer.__self__.DESCRIPTOR

    def read(data: bytes) -> Message:
        limits.on_read(len(data))
        if len(data) > max_bytes:
            raise too_large("the request", max_bytes)
        if found := excess(data, descriptor, limits.wire):
            raise _refusal(found, limits.names)
        try:
            return handler.request_deserializer(data)
        except DecodeError as error:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                f"the request is no such message, or holds text that is not UTF-8 ({error})",
            ) from error

    async def read_one(stream: AsyncIterator[bytes]) -> Message:
        try:
            # Left open, gRPC's iterator would hold the message until the garbage collector runs.
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

    A message that is refused raises `ServiceError`, and the next `anext` reads on: a service may answer the
    error within its stream.
    """

    def __init__(self, stream: AsyncIterator[bytes], read: Callable[[bytes], Message]):
        self._stream, self._read = aiter(stream), read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        return self._read(await anext(self._stream))


def _refusal(found: Excess, names: Mapping[str, str]) -> ServiceError:
    if found.path:
        rule = f"{found.num_bytes} bytes are more than {found.most} numbers take"
        return invalid(names.get(found.path, found.path), rule)
    return ServiceError(
        Code.INVALID_ARGUMENT,
        f"the request holds more than the {found.most} fields that this server takes",
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
    """The error that the client gets; without tracebacks.

    gRPC keeps what ends a call until the garbage collector runs. Frames of a traceback would keep the
    message with it, and some dozens of refused messages of 8 MiB would fill gigabytes.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ServiceError):
        report(error)
        made = error
    else:
        _log.exception("a call failed", exc_info=error)
        made = failure(error)
    made.__traceback__ = made.__context__ = made.__cause__ = None
    return made


async def _nothing(stream: AsyncIterator[bytes]) -> None:
    """Messages of clients without a token are not read."""


async def _nobody(request, context):
    raise ServiceError(
        Code.UNAUTHENTICATED,
        "send a known token as metadata: authorization: Bearer TOKEN",
    )


async def _nobody_streams(request, context):
    yield await _nobody(request, context)


def _rebuilt(handler: grpc.RpcMethodHandler, behaviour: Callable) -> grpc.RpcMethodHandler:
    """The handler with another behaviour, which takes a stream of bytes.

    For a single request too: gRPC would otherwise wait for the whole request, for any time, before the
    behaviour can refuse the call.
    """
    responses = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"stream_{responses}_rpc_method_handler")
    return make(behaviour, None, handler.response_serializer)
