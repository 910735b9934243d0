"""Runs OpenAI's two generating routes: body in, answer or events out, and an eye on the client.

Nothing is sent before the first delta, so whatever goes wrong until then has its own status, for streams
too. A client that leaves, waiting in the queue or reading, ends its requests at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial

import grpc
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serving.bounded_pool import BoundedPool
from serving.errors import ServiceError, failure, invalid
from serving.frontend import Frontend
from serving.harmony import Spoken
from serving.http import reports
from serving.http.body import Body, BodyMemory, Gone
from serving.http.errors import error_answer
from serving.http.reply import Reply
from serving.http.route import Call, Caller, Encode, Route
from serving.json_input import parse_object
from serving.rpc import calls
from serving.stream import Delta, Stream

_log = logging.getLogger(__name__)
_TRACE = ("traceparent", "tracestate")
_SHORT = 4096  # bytes of a body that the event loop reads in about 1 ms
_MAX_WAITING = 64  # larger ones
_MAX_BODIES = 32  # of the largest size, held until they are parsed


class Reader:
    """What all generating routes share to read bodies: memory for them, and a thread for large ones."""

    def __init__(self, *, max_bytes: int, on_free: Callable[[int], None]):
        self.max_bytes = max_bytes
        self._memory = BodyMemory(_MAX_BODIES * max_bytes, on_free)
        # json.loads keeps the global lock, so a second thread would win nothing.
        self._pool = BoundedPool("json", "large requests", num_threads=1, max_waiting=_MAX_WAITING)

    def body(self) -> Body:
        """A body that has yet to come."""
        return Body(self._memory)

    async def run[T](self, size: int, function: Callable[[], T]) -> T:
        """`function()`, which reads a body of `size` bytes, beside the event loop if that takes long."""
        return function() if size <= _SHORT else await self._pool.run(function)


class Generation:
    """One route as an ASGI application."""

    def __init__(self, route: Route, frontend: Frontend, reader: Reader):
        self._route, self._frontend, self._reader = route, frontend, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, body = Reply(scope, receive, send), self._reader.body()
        try:
            await body.read(Headers(scope=scope), receive, self._reader.max_bytes)
            await self._while_client_stays(receive, self._work(Headers(scope=scope), body, reply))
        except Gone:
            return
        except ServiceError as error:
            self._frontend.refused("http", self._route.path, error)
            is_late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            # A slow client shall not hold the connection too.
            await reply.whole(error_answer(error, {"connection": "close"} if is_late else None))
        finally:
            body.free()

    async def _while_client_stays(self, receive: Receive, answer: Coroutine) -> None:
        work = asyncio.create_task(answer)
        leave = asyncio.create_task(_client_leaves(receive))
        try:
            await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            leave.cancel()
            await asyncio.gather(work, leave, return_exceptions=True)

    async def _work(self, headers: Headers, body: Body, reply: Reply) -> None:
        """Answers; every error ends in a response or, once that has begun, in an event."""
        try:
            read = partial(self._read, headers, body, reply)
            encode = await self._reader.run(len(body.content), read)
            body.free()
            call = await encode()
            del encode  # it holds the prompts as they came, and generation may take minutes
            await self._answer(call, reply)
        except ServiceError as error:
            self._frontend.refused("http", self._route.path, error)
            await reply.fail(error)
        except OSError as error:
            _log.debug("a client left while it was answered: %r", error)
        except Exception as error:
            _log.exception("a request failed")
            await reply.fail(failure(error))

    def _read(self, headers: Headers, body: Body, reply: Reply) -> Encode:
        limits = self._frontend.limits
        max_ids = limits.max_n * self._frontend.config.max_model_len
        content = parse_object(body.content, field="body", limits=limits, max_ids=max_ids)
        given = content.pop("request_id", None)
        request_id = _request_id(headers.get("x-request-id", "") if given is None else given)
        reply.headers["x-request-id"] = request_id
        trace = {name: headers[name] for name in _TRACE if name in headers}
        return self._route.read(content, Caller(request_id=request_id, trace=trace))

    async def _answer(self, call: Call, reply: Reply) -> None:
        envelope = {
            "id": f"{self._route.prefix}{reply.headers['x-request-id']}",
            "object": None,
            "created": int(time.time()),
            "model": self._frontend.name,
        }
        async with contextlib.AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(self._frontend.open(ask)) for ask in call.asks
            ]
            if call.options.is_stream:
                envelope["object"] = self._route.part_object
                await _send_events(call, streams, envelope, reply)
            else:
                envelope["object"] = self._route.whole_object
                await reply.content(await _whole(call, streams, envelope))


async def _whole(call: Call, streams: Sequence[Stream], envelope: dict) -> dict:
    """The complete answer."""
    deltas: dict[int, list[Delta]] = {}
    async with contextlib.aclosing(_deltas(streams, call.options.n)) as news:
        async for index, delta in news:
            deltas.setdefault(index, []).append(delta)
    choices = [call.choices.whole(index, _joined(deltas[index])) for index in sorted(deltas)]
    usage = {"usage": reports.final_usage(streams)}
    return envelope | {"choices": choices} | usage | reports.speculation(streams)


async def _send_events(call: Call, streams: Sequence[Stream], envelope: dict, reply: Reply) -> None:
    """The answer in chunks; the usage comes last, without choices."""
    options = call.options
    num_prompt = sum(len(ask.prompt) for ask in call.asks)
    num_tokens = 0
    async with contextlib.aclosing(_deltas(streams, options.n)) as news:
        async for index, delta in news:
            chunk = envelope | {"choices": [call.choices.part(index, delta)]}
            num_tokens += len(delta.tokens)
            if options.with_running_usage:
                chunk["usage"] = reports.running_usage(num_prompt, num_tokens)
            await reply.event(chunk)
    if options.with_usage:
        usage = {"choices": [], "usage": reports.final_usage(streams)}
        await reply.event(envelope | usage | reports.speculation(streams))
    await reply.end_events()


async def _deltas(streams: Sequence[Stream], n: int) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all prompts as they come, with the number of their choice."""
    waiting = {asyncio.create_task(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting[task]
                delta = task.result()
                del waiting[task]
                if delta is not None:
                    waiting[asyncio.create_task(_next(streams[place]))] = place
                    yield place * n + delta.index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: Stream) -> Delta | None:
    return await anext(stream, None)


def _joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of a sequence as one."""
    spoken, logprobs = Spoken(), None
    for delta in deltas:
        spoken += Spoken(delta.text, delta.reasoning)
        if delta.logprobs is not None:
            logprobs = (logprobs or []) + delta.logprobs
    return replace(
        deltas[-1],
        tokens=[token for delta in deltas for token in delta.tokens],
        text=spoken.text,
        reasoning=spoken.reasoning,
        logprobs=logprobs,
    )


def _request_id(given: object) -> str:
    if not isinstance(given, str):
        raise invalid("request_id", "must be a string")
    if not (given.isascii() and given.isprintable()):
        raise invalid("request_id", "must be printable ASCII")
    return calls.request_id(given)


async def _client_leaves(receive: Receive) -> None:
    """Returns when the connection is lost."""
    while (await receive())["type"] != "http.disconnect":
        pass
