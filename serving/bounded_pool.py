"""Threads for work that would block the event loop, with limits on what runs and what waits."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from serving.errors import Code, ServiceError


class BoundedPool:
    """Runs functions in threads.

    A caller that is cancelled while it waits leaves nothing behind. One that is cancelled while its
    function runs leaves the thread busy until the function returns: nothing can interrupt it. A
    function runs in its caller's context (`contextvars`).

    Args:
      name: name of the threads.
      what: noun in the plural for what waits, in error messages.
      num_threads: most functions that run at once.
      max_waiting: most functions that wait; further calls are refused.
    """

    def __init__(self, name: str, what: str, *, num_threads: int, max_waiting: int):
        self._what, self._max_waiting = what, max_waiting
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        # Callers wait here and not in the executor's queue, which would keep cancelled work until
        # its turn.
        self._free = asyncio.Semaphore(num_threads)
        self._num_waiting = 0
        self._running: set[Future] = set()

    async def run[T](self, function: Callable[[], T]) -> T:
        """Runs a function in a thread and returns its result.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED if too many functions wait; UNAVAILABLE if the pool is
            closed.
        """
        if self._num_waiting >= self._max_waiting:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
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
                loop.call_soon_threadsafe(self._release, future)

        # The future is part of a reference cycle: it would keep a large result until a garbage
        # collection.
        outcome: list[tuple[T, None] | tuple[None, Exception]] = []

        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome.append((context.run(function), None))
            except Exception as error:
                outcome.append((None, error))

        try:
            future = self._executor.submit(work)
        except RuntimeError as error:
            self._free.release()  # for the next caller that waits, which is refused too
            raise ServiceError(
                Code.UNAVAILABLE, "the server shuts down; use another server"
            ) from error
        self._running.add(future)
        future.add_done_callback(release)
        await asyncio.wrap_future(future)
        result, error = outcome.pop()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle

    def _release(self, future: Future) -> None:
        self._running.discard(future)
        self._free.release()

    def close(self) -> None:
        """Takes no more work; functions that run continue."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def wait_closed(self, seconds: float) -> bool:
        """Waits until no function runs, for at most `seconds`; returns whether none does."""
        futures = [asyncio.wrap_future(future) for future in self._running]
        return not futures or not (await asyncio.wait(futures, timeout=seconds))[1]
