"""Runs the routes that take a JSON object: reads the body, opens streams of the engine, sends the
answer.

The response begins with the first delta, so an error before it has its own HTTP status, for streams
too. A lost connection cancels its requests at once, queued or running.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serving import caller, request_ids
from serving.bounded_pool import BoundedPool
from serving.errors import Code, ServiceError, failure, invalid
from serving.frontend import Frontend
from serving.http.body import Body, BodyMemory, Gone
from serving.http.reply import Reply
from serving.http.route import Answer, Call, Caller, Encode, Route
from serving.json_input import parse_object
from serving.replies.parts import ReplyPart
from serving.stream import Delta, Stream

_log = logging.getLogger(__name__)
_SHORT = 4096  # bytes; the event loop parses such a body in about 1 ms
_MAX_WAITING = 64  # larger bodies that wait for the parser
_MAX_BODIES = 32  # bodies of the largest size that memory holds until they are parsed


class Reader:
    """Reads the bodies of all generating routes: bounded memory, and a thread that parses large
    ones.
    """

    def __init__(self, *, max_bytes: int, on_free: Callable[[int], None]):
        self.max_bytes = max_bytes
        self._memory = BodyMemory(_MAX_BODIES * max_bytes, on_free)
        # json.loads holds the GIL, so a second thread would not be faster.
        self._pool = BoundedPool("json", "large requests", num_threads=1, max_waiting=_MAX_WAITING)

    def body(self) -> Body:
        """The body of a new request."""
        return Body(self._memory)

    async def run[T](self, size: int, function: Callable[[], T]) -> T:
        """Calls `function`, which parses a body of `size` bytes: in a thread if the
        body is large.
        """
        return function() if size <= _SHORT else await self._pool.run(function)


class Generation:
    """One route as an ASGI application."""

    def __init__(self, route: Route, frontend: Frontend, reader: Reader):
        self._route, self._frontend, self._reader = route, frontend, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, body = Reply(scope, receive, send, self._route.dialect), self._reader.body()
        try:
            if self._route.is_for_admins:
                caller.check_admin()
            await body.read(Headers(scope=scope), receive, self._reader.max_bytes)
            await self._while_connected(receive, self._work(scope, body, reply))
        except Gone:
            return
        except ServiceError as error:
            self._frontend.refused("http", self._route.path, error)
            is_late = error.code is Code.DEADLINE_EXCEEDED
            # Close the connection after a timeout, so that a slow client does not keep it.
            await reply.error(error, {"connection": "close"} if is_late else None)
        finally:
            body.free()

    async def _while_connected(self, receive: Receive, answer: Coroutine) -> None:
        work = asyncio.create_task(answer)
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)

    async def _work(self, scope: Scope, body: Body, reply: Reply) -> None:
        """Answers. An error becomes a response or, after the response has begun, an event."""
        try:
            address, _ = scope.get("client") or ("", 0)
            read = partial(self._read, Headers(scope=scope), address, body, reply)
            encode = await self._reader.run(len(body.content), read)
            body.free()
            call = await encode()
            del encode  # frees the texts of the prompts: generation may take minutes
            if isinstance(call, dict):
                await reply.content(call)
                return
            await self._answer(call, address, reply)
        except ServiceError as error:
            self._frontend.refused("http", self._route.path, error)
            await reply.fail(error)
        except OSError as error:
            _log.debug("a client disconnected during its answer: %r", error)
        except Exception as error:
            _log.exception("a request failed")
            await reply.fail(failure(error))

    def _read(self, headers: Headers, address: str, body: Body, reply: Reply) -> Encode:
        limits = self._frontend.limits
        max_ids = limits.max_n * self._frontend.config.max_model_len
        content = parse_object(body.content, field="body", limits=limits, max_ids=max_ids)
        given = content.pop("request_id", None)
        request_id = _request_id(headers.get("x-request-id", "") if given is None else given)
        reply.set_id(request_id)
        trace = request_ids.trace_headers(headers.items())
        return self._route.read(
            content, Caller(request_id=request_id, address=address, trace=trace)
        )

    async def _answer(self, call: Call, address: str, reply: Reply) -> None:
        async with _opened(call, self._frontend, address) as streams:
            if call.answer.is_stream:
                await _send_events(call.answer, streams, reply)
            else:
                await reply.content(await _whole(call.answer, streams))


@contextlib.asynccontextmanager
async def _opened(call: Call, frontend: Frontend, address: str) -> AsyncIterator[list[Stream]]:
    """The streams of a request, which end with the block; its constraints are compiled first."""
    asks = [await frontend.constrain(ask, address=address) for ask in call.asks]
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(frontend.open(ask)) for ask in asks]


async def whole_answer(route: Route, frontend: Frontend, content: dict, caller: Caller) -> dict:
    """The content of the complete answer to a request that asks for no stream.

    Raises:
      ServiceError: the request is refused, or ends with an error.
    """
    call = await route.read(content, caller)()
    if isinstance(call, dict):
        return call
    async with _opened(call, frontend, caller.address) as streams:
        return await _whole(call.answer, streams)


async def _whole(answer: Answer, streams: Sequence[Stream]) -> dict:
    """The complete answer."""
    deltas: dict[int, list[Delta]] = {}
    async with contextlib.aclosing(_deltas(streams, answer.n)) as all_deltas:
        async for index, delta in all_deltas:
            deltas.setdefault(index, []).append(delta)
    return answer.whole({index: _joined(parts) for index, parts in deltas.items()}, streams)


async def _send_events(answer: Answer, streams: Sequence[Stream], reply: Reply) -> None:
    """Sends the answer in events."""
    async with contextlib.aclosing(_deltas(streams, answer.n)) as all_deltas:
        async for index, delta in all_deltas:
            for event in answer.part(index, delta, streams):
                await reply.event(event)
    for event in answer.end(streams):
        await reply.event(event)
    await reply.end_events()


async def _deltas(streams: Sequence[Stream], n: int) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all prompts in the order of arrival, each with the index of its choice."""
    if len(streams) == 1:  # without tasks, which would take a quarter of the time of an event
        async for delta in streams[0]:
            yield delta.index, delta
        return
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
    """Joins all deltas of a sequence."""
    output = ReplyPart.joined([delta.reply for delta in deltas])
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        tokens=[token for delta in deltas for token in delta.tokens],
        text=output.text,
        reasoning=output.reasoning,
        calls=output.calls,
        order=output.order,
        logprobs=[one for logprobs in scored for one in logprobs] if scored else None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        rounds=[one for delta in deltas for one in delta.rounds],
    )


def _request_id(given: object) -> str:
    if not isinstance(given, str):
        raise invalid("request_id", "must be a string")
    return request_ids.request_id(given)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the connection is lost."""
    while (await receive())["type"] != "http.disconnect":
        pass
