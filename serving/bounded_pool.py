"""Threads for the work of requests that would hold up the event loop: few at a time, few that wait."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from serving.errors import ServiceError


class BoundedPool:
    """Runs functions in threads.

    A caller that is cancelled while it waits leaves nothing behind. One that is cancelled while its
    function runs leaves the thread busy until the function returns: nothing can interrupt it.

    Args:
      name: of the threads.
      what: what waits, in the plural, for the message of a refusal.
      num_threads: functions that run at once.
      max_waiting: functions that wait; beyond it calls are refused.
    """

    def __init__(self, name: str, what: str, *, num_threads: int, max_waiting: int):
        self._what, self._max_waiting = what, max_waiting
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        # Work waits here and not in the executor's queue, which keeps cancelled work until its turn.
        self._free = asyncio.Semaphore(num_threads)
        self._num_waiting = 0

    async def run[T](self, function: Callable[[], T]) -> T:
        """What `function` returns.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED; too many wait already. UNAVAILABLE; the pool is closed.
        """
        if self._num_waiting >= self._max_waiting:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._num_waiting} {self._what} are waiting already; try again later",
                retry_after=1.0,
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        loop = asyncio.get_running_loop()

        def release(future: Future) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._free.release)

        # Not through the future, which is part of a cycle: a large result would stay until that is found.
        outcome: list[tuple[T, None] | tuple[None, Exception]] = []

        def work() -> None:
            try:
                outcome.append((function(), None))
            except Exception as error:
                outcome.append((None, error))

        try:
            future = self._executor.submit(work)
        except RuntimeError as error:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "the server shuts down; use another server"
            ) from error
        future.add_done_callback(release)
        await asyncio.wrap_future(future)
        result, error = outcome.pop()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback leads here

    def close(self) -> None:
        """Takes no more work; what runs goes on to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
