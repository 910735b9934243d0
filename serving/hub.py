"""The engine process's side of the socket to the process that serves clients.

    first process -- frames -- Hub: thread --+--> EngineWorker: submit, abort, flush
         ^                                   +--> threads: constraints
         |
         +-- one frame a round, by the engine's thread, never waiting <-- EngineWorker: deliver

Without the first process the engine ends.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from peagle_jax.config import ConfigError
from serving.constraint_memory import ConstraintsFull
from serving.frames import Channel, ClosedError, encode, packed
from serving.messages import Checked, Event, Job, Listener
from serving.worker import EngineWorker

_log = logging.getLogger(__name__)
_MOST_UNREAD = 256 << 20
"""Bytes that the first process may leave unread, minutes of output at full speed; beyond it counts
as gone.
"""
_TICK = 1.0  # seconds between two looks at the engine
_NUM_THREADS = 2  # that compile constraints
_NICE = 10  # of these threads: rounds come first


def _leave_processor_to_others() -> None:
    """Lowers the priority of this thread, where threads have one of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Outbox:
    """Sends frames over a socket in non-blocking mode. `send` may be called by any thread; it never
    waits.

    Args:
      wake: called when the socket does not take all: `flush` sends more, once it can.
    """

    def __init__(self, connection: socket.socket, wake: Callable[[], None]):
        self._socket, self._wake = connection, wake
        self._unsent, self._lock, self._is_gone = bytearray(), threading.Lock(), False

    @property
    def has_unsent(self) -> bool:
        """Whether frames, or parts of them, wait."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Sends what the socket has room for, and keeps the rest."""
        with self._lock:
            if self._is_gone:
                return
            waits = bool(self._unsent)
            self._unsent += frame
            if not waits:
                self._write()
                if self._unsent:
                    self._wake()
            elif len(self._unsent) > _MOST_UNREAD:
                _log.error("the first process of the server reads nothing: it counts as gone")
                self._give_up()

    def flush(self) -> None:
        """Sends more of the rest."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        self._is_gone = True
        self._unsent.clear()
        with contextlib.suppress(OSError):  # the thread of the hub reads the end
            self._socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """Connects the engine with the process that serves clients.

    Args:
      connection: to that process.
      on_lost: called in the hub's thread when that process is gone.

    Attributes:
      orders: the messages that concern the process of the engine itself.
    """

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]):
        connection.setblocking(False)
        self._channel, self._on_lost = Channel(connection), on_lost
        self._awake, self._waker = socket.socketpair()
        for one in (self._awake, self._waker):
            one.setblocking(False)
        self._outbox = Outbox(connection, self._wake)
        self._matchers: dict[Hashable, object] = {}
        """Compiled constraints whose jobs have not come yet."""
        self.orders: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._worker: EngineWorker | None = None
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar", _leave_processor_to_others)
        self._memory: object = None
        threading.Thread(target=self._run, name="hub", daemon=True).start()

    def send(self, *message: object) -> None:
        """Sends a message; any thread may call it."""
        self._outbox.send(encode(message))

    def describe(self, worker: EngineWorker) -> None:
        """Tells the first process what the engine is, which then submits jobs to its worker, and
        starts the worker.
        """
        self._worker = worker
        of = worker.description
        folder = None if of.tokenizer is None else of.tokenizer.folder
        parts = of.config, of.target_config, of.drafter_config, folder
        self.send("described", parts, worker.load)
        listener = Listener(
            deliver=self._deliver,
            on_ready=lambda: self.send("ready"),
            on_death=lambda death: self.send("dead", death),
        )
        worker.start(listener, call=lambda function, *args: function(*args))

    def _deliver(self, events: Sequence[Event], num_tokens: int) -> None:
        """Called by the engine's thread after each round."""
        state = self._worker.load, self._worker.batch_sizes_pending
        self.send("round", packed(events), num_tokens, *state)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Nobody would read submits and aborts any more. The end of this process gives every
            # request its status.
            _log.exception("the engine's process cannot go on")
            logging.shutdown()
            os._exit(1)

    def _serve(self) -> None:
        ours = self._channel.connection
        looked = time.monotonic()
        while True:
            writing = [ours] if self._outbox.has_unsent else []
            readable, writable, _ = select.select([ours, self._awake], writing, [], _TICK)
            if self._awake in readable:
                self._awake.recv(4096)
            if writable:
                self._outbox.flush()
            if ours in readable:
                try:
                    messages = self._channel.feed()
                except (ClosedError, OSError):
                    self._on_lost()
                    return
                for message in messages:
                    self._handle(message)
            if time.monotonic() - looked > _TICK:
                looked = time.monotonic()
                self._look()

    def _look(self) -> None:
        """Tells what no round does: a round that takes long, and memory."""
        if self._worker is None:
            return
        busy = self._worker.busy_seconds
        if busy > _TICK:
            self.send("busy", busy)
        try:
            memory = dict(self._worker.device_memory)
        except RuntimeError:  # of a device that fails: its rounds say so
            return
        if memory != self._memory:
            self._memory = memory
            self.send("memory", memory)

    def _handle(self, message: tuple) -> None:
        match message:
            case "submit", jobs:
                self._submit(jobs)
            case "abort", key:
                self._worker.abort(key)
            case "flush", call, salt:
                self._worker.flush_prefix_cache(
                    salt, lambda pages: self.send("answer", call, pages)
                )
            case "control", call, order:
                self._worker.control(order, lambda answer: self.send("answer", call, answer))
            case "compile", call, constraint, number:
                self._pool.submit(self._compile, call, constraint, number)
            case "forget", place:
                self._matchers.pop(place, None)
            case _:
                self.orders.put(message)

    def _submit(self, jobs: Sequence[Job]) -> None:
        compiled = [job.matcher and self._matchers.pop(job.matcher) for job in jobs]
        pairs = zip(jobs, compiled, strict=True)
        self._worker.submit([replace(job, matcher=matcher) for job, matcher in pairs])

    def _compile(self, call: int, constraint: Checked | None, number: int) -> None:
        """Compiles a constraint, or only reads the vocabulary. Runs in a thread of the pool."""
        answer: object = None
        try:
            if constraint is None:
                self._worker.prepare_matchers()
            else:
                for index, one in enumerate(self._worker.matchers(constraint, number)):
                    self._matchers[call, index] = one
        except BaseException as error:  # without an answer the other process would wait
            answer = error
            if not isinstance(error, ConfigError | ConstraintsFull):
                _log.exception("a constraint cannot be compiled")
                answer = RuntimeError(repr(error))
            else:  # without its frames, which hold the constraint's lease
                answer = error.with_traceback(None)
        self.send("answer", call, answer)
