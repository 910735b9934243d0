"""The engine as a process without it sees it: the other end of a socket, read by the event loop."""

import asyncio
import itertools
import logging
import socket
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from peagle_jax.config import ConfigError
from peagle_jax.engine.host.pages import Salt
from peagle_jax.engine.host.stats import DeviceMemory
from peagle_jax.text.tokenizer import Tokenizer
from serving.errors import Code, ServiceError
from serving.frames import Channel, ClosedError, encode, unpacked
from serving.messages import Checked, Control, Death, Description, Job, Listener

_log = logging.getLogger(__name__)
GONE = Death("process ended", "its process has ended")


class _Matcher:
    """Stands for a compiled constraint, which the process of the engine holds until this object is
    gone.
    """

    def __init__(self, place: tuple[int, int], forget: Callable[[tuple[int, int]], None]):
        self.place = place
        self.finalizer = weakref.finalize(self, forget, place)
        self.finalizer.atexit = False


class RemoteEngine:
    """`messages.Worker` at the other end of a socket. All methods but those that block belong to
    the event loop.

    Args:
      connection: to the `hub.Hub` of the engine's process.

    Attributes:
      end: called by `stop`: ends the process of the engine within some seconds; returns whether it
        did.
      on_lost: called when the process of the engine is gone, after the listener has heard of its
        death.
    """

    def __init__(self, connection: socket.socket):
        self._channel = Channel(connection)
        self.busy_seconds = 0.0
        self.batch_sizes_pending = 0
        self.device_memory: Mapping[int, DeviceMemory] = {}
        self.end: Callable[[float], bool] = lambda timeout: True
        self.on_lost: Callable[[], None] = lambda: None
        self._calls: dict[int, Future] = {}
        self._numbers = itertools.count()
        self._unsent = bytearray()
        self._is_gone = self._is_ending = False

    def wait_for_description(self, tokenizer: Tokenizer | None) -> None:
        """Waits until the engine is made; blocks.

        Args:
          tokenizer: used if it is that of the engine.

        Raises:
          ConfigError: the engine cannot be made.
          ClosedError: the process of the engine has ended.
        """
        kind, *content = self._channel.receive()
        if kind == "refused":
            raise ConfigError(content[0])
        (*models, folder), self.load = content
        if folder is None:
            tokenizer = None
        elif tokenizer is None or tokenizer.folder != Path(folder):
            tokenizer = Tokenizer(folder)
        self.description = Description(*models, tokenizer)

    def start(self, listener: Listener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._channel.connection.setblocking(False)
        self._loop.add_reader(self._channel.connection, self._read)
        for message in self._channel.rest():
            self._loop.call_soon(self._handle, message)

    def submit(self, jobs: Sequence[Job]) -> None:
        self._send(("submit", [self._portable(job) for job in jobs]))

    def abort(self, key: Hashable) -> None:
        self._send(("abort", key))

    def flush_prefix_cache(self, salt: Salt, on_done: Callable[[int], None]) -> None:
        done = lambda answer: None if answer.exception() else on_done(answer.result())
        self._call("flush", salt).add_done_callback(done)

    def control(self, order: Control, on_done: Callable[[str | Exception], None]) -> None:
        done = lambda answer: on_done(answer.exception() or answer.result())
        self._call("control", order).add_done_callback(done)

    def prepare_matchers(self) -> None:
        """Called in threads."""
        self._ask("compile", None, 0)

    def matchers(self, constraint: Checked, number: int) -> list[_Matcher]:
        """Called in threads."""
        call = self._ask("compile", constraint, number)
        return [_Matcher((call, index), self._forget) for index in range(number)]

    def stop(self, timeout: float) -> bool:
        self._is_ending = True
        return self.end(timeout)

    def order(self, message: tuple) -> None:
        """Sends an order to the process of the engine; any thread may call it."""
        self._loop.call_soon_threadsafe(self._send, message)

    def _portable(self, job: Job) -> Job:
        if job.matcher is None:
            return job
        job.matcher.finalizer.detach()
        return Job(job.key, job.prompt, job.params, job.salt, job.priority, job.matcher.place)

    def _forget(self, place: tuple[int, int]) -> None:
        """Called wherever the last reference ends, within a send too."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, ("forget", place))

    def _ask(self, *message: object) -> int:
        """The number of a call that has been answered; blocks a thread.

        Raises:
          ConfigError: the answer is one.
          ServiceError: UNAVAILABLE; the process of the engine is gone.
        """
        number, answer = next(self._numbers), Future()
        try:
            self._loop.call_soon_threadsafe(self._begin, number, answer, message)
        except RuntimeError as error:  # the loop is closed
            raise ServiceError(Code.UNAVAILABLE, "the server shuts down") from error
        answer.result()
        return number

    def _call(self, *message: object) -> Future:
        answer: Future = Future()
        self._begin(next(self._numbers), answer, message)
        return answer

    def _begin(self, number: int, answer: Future, message: tuple) -> None:
        kind, *content = message
        if self._is_gone:
            answer.set_exception(_unavailable())
        else:
            self._calls[number] = answer
            self._send((kind, number, *content))

    def _send(self, message: tuple) -> None:
        if self._is_gone:
            return
        waits = bool(self._unsent)
        self._unsent += encode(message)
        if not waits:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._channel.connection, self._write)

    def _write(self) -> None:
        try:
            del self._unsent[: self._channel.connection.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent.clear()  # the reader finds the end
        if not self._unsent:
            self._loop.remove_writer(self._channel.connection)

    def _read(self) -> None:
        try:
            messages = self._channel.feed()
        except (ClosedError, OSError):
            self._lose()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: tuple) -> None:
        match message:
            case "round", items, num_tokens, load, pending:
                self.load, self.busy_seconds = load, 0.0
                self.batch_sizes_pending = pending
                self._listener.deliver(unpacked(items), num_tokens)
            case "answer", number, value:
                self._answer(number, value)
            case "busy", seconds:
                self.busy_seconds = seconds
            case "memory", memory:
                self.device_memory = memory
            case ("ready",):
                self._listener.on_ready()
            case "dead", death:
                self._listener.on_death(death)

    def _answer(self, number: int, value: object) -> None:
        answer = self._calls.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    def _lose(self) -> None:
        self._is_gone = True
        self._loop.remove_reader(self._channel.connection)
        self._loop.remove_writer(self._channel.connection)
        for number in list(self._calls):
            self._answer(number, _unavailable())
        if not self._is_ending:
            self._listener.on_death(GONE)
            self.on_lost()


def _unavailable() -> ServiceError:
    return ServiceError(Code.UNAVAILABLE, "the engine's process has ended")
