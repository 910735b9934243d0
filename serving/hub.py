"""The engine process's side of the sockets to the processes that serve clients.

    process 0 (the first one) ---+                 +--> EngineWorker: submit, abort, flush
    process 1 ---------- frames -+--> Hub: thread -+--> threads: constraints
    ...                                            |
       ^                                           |
       +-- one frame a round, written by the engine's thread, never waiting <-- EngineWorker: deliver

Process 0 is the server's first process: without it the engine ends. The requests of another process that is gone are aborted.
"""

import contextlib
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from peagle_jax.config import ConfigError
from serving.constraint_memory import ConstraintsFull
from serving.frames import Channel, ClosedError, encode, packed, packed_load
from serving.messages import Checked, Event, IdIsTaken, Job, Listener, Name, Refused
from serving.worker import EngineWorker

_log = logging.getLogger(__name__)
_MOST_UNREAD = 256 << 20
"""Bytes that a process may leave unread, minutes of output at full speed; beyond it counts as gone."""
_TICK = 1.0  # seconds between two looks at the engine
_NUM_THREADS = 2  # that compile constraints
_NICE = 10  # of these threads: rounds come first


def _leave_processor_to_others() -> None:
    """Lowers the priority of this thread, where threads have one of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Peer:
    """One process that serves clients. `send` may be called by any thread; it never waits."""

    def __init__(self, index: int, connection: socket.socket, wake: Callable[[], None]):
        connection.setblocking(False)
        self.index, self.channel, self._wake = index, Channel(connection), wake
        self.jobs: set[Hashable] = set()
        """Keys of its jobs that have not ended."""
        self.matchers: dict[Hashable, object] = {}
        """Compiled constraints whose jobs have not come yet."""
        self.is_gone = False
        self._unsent, self._lock = bytearray(), threading.Lock()

    @property
    def socket(self) -> socket.socket:
        return self.channel.connection

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Sends what the socket has room for, and keeps the rest."""
        with self._lock:
            if self.is_gone:
                return
            waits = bool(self._unsent)
            self._unsent += frame
            if not waits:
                self._write()
                if self._unsent:
                    self._wake()
            elif len(self._unsent) > _MOST_UNREAD:
                _log.error("process %d of the server reads nothing: it counts as gone", self.index)
                self._give_up()

    def flush(self) -> None:
        """Sends more of the rest."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        try:
            del self._unsent[: self.socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        self.is_gone = True
        self._unsent.clear()
        # The thread of the hub reads the end, and aborts what the process has asked for.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """Connects the engine with the processes that serve clients.

    Args:
      connections: one end each; that of process 0 comes first.
      on_lost: called in the hub's thread when process 0 is gone.

    Attributes:
      orders: the messages of process 0 that concern the process of the engine itself.
    """

    def __init__(self, connections: Sequence[socket.socket], on_lost: Callable[[], None]):
        self._awake, self._waker = socket.socketpair()
        for one in (self._awake, self._waker):
            one.setblocking(False)
        self._peers = [_Peer(i, one, self._wake) for i, one in enumerate(connections)]
        self._on_lost = on_lost
        self.orders: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._worker: EngineWorker | None = None
        self._names: dict[Name, int] = {}
        """The process that holds the open request of a caller and an id."""
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar", _leave_processor_to_others)
        self._memory: object = None
        threading.Thread(target=self._run, name="hub", daemon=True).start()

    def send(self, message: tuple, to: int | None = None) -> None:
        """Sends a message to all processes, or to one of them."""
        frame = encode(message)
        for peer in self._peers if to is None else [self._peers[to]]:
            peer.send(frame)

    def describe(self, worker: EngineWorker) -> None:
        """Tells all processes what the engine is, which then submit jobs to its worker, and starts the worker."""
        self._worker = worker
        of = worker.description
        folder = None if of.tokenizer is None else of.tokenizer.folder
        parts = of.config, of.target_config, of.drafter_config, folder
        self.send(("described", parts, packed_load(worker.load)))
        ignored = lambda *_: None

        listener = Listener(
            deliver=self._deliver,
            on_ready=lambda: self.send(("ready",)),
            on_death=lambda death: self.send(("dead", death)),
            abort=ignored,
            snapshot=ignored,
        )
        worker.start(listener, call=lambda function, *args: function(*args))

    def _deliver(self, events: Sequence[Event], num_tokens: int) -> None:
        """Called by the engine's thread after each round."""
        mine: list[list[Event]] = [[] for _ in self._peers]
        for event in events:
            key = event.keys[0] if isinstance(event, Refused) else event.key
            mine[key[0]].append(event)
            if isinstance(event, Refused):
                self._peers[key[0]].jobs.difference_update(event.keys)
            elif event.request is not None:
                self._peers[key[0]].jobs.discard(key)
        state = packed_load(self._worker.load), self._worker.batch_sizes_pending
        for peer, own in zip(self._peers, mine, strict=True):
            total = None if peer.index else num_tokens
            peer.send(encode(("round", packed(own), total, *state)))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Nobody would read submits and aborts any more. The end of this process gives every request its status.
            _log.exception("the engine's process cannot go on")
            logging.shutdown()
            os._exit(1)

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._awake, selectors.EVENT_READ)
        for peer in self._peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        looked = time.monotonic()
        while True:
            for key, events in selector.select(_TICK):
                if key.data is None:
                    self._awake.recv(4096)
                    continue
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ and not self._read(key.data):
                    selector.unregister(key.fileobj)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    wanted = selectors.EVENT_READ | selectors.EVENT_WRITE * key.data.has_unsent
                    if wanted != key.events:
                        selector.modify(key.fileobj, wanted, key.data)
            if time.monotonic() - looked > _TICK:
                looked = time.monotonic()
                self._look()

    def _look(self) -> None:
        """Tells the processes what no round does: a round that takes long, and memory."""
        if self._worker is None:
            return
        busy = self._worker.busy_seconds
        if busy > _TICK:
            self.send(("busy", busy))
        try:
            memory = dict(self._worker.device_memory)
        except RuntimeError:  # of a device that fails: its rounds say so
            return
        if memory != self._memory:
            self._memory = memory
            self.send(("memory", memory))

    def _read(self, peer: _Peer) -> bool:
        """Handles what a process has sent; False once it is gone."""
        try:
            messages = peer.channel.feed()
        except (ClosedError, OSError):
            self._lose(peer)
            return False
        for message in messages:
            self._handle(peer, message)
        return True

    def _handle(self, peer: _Peer, message: tuple) -> None:
        match message:
            case "submit", jobs, name:
                self._submit(peer, jobs, name)
            case "abort", key:
                self._worker.abort((peer.index, *key))
            case "closed", name:
                if self._names.get(name) == peer.index:
                    del self._names[name]
            case "abort-name", call, name:
                owner = self._names.get(name, peer.index)
                if owner != peer.index:
                    self.send(("abort", name), to=owner)
                self.send(("answer", call, owner != peer.index), to=peer.index)
            case "flush", call, salt:
                answer = lambda pages: self.send(("answer", call, pages), to=peer.index)
                self._worker.flush_prefix_cache(salt, answer)
            case "compile", call, constraint, number:
                self._pool.submit(self._compile, peer, call, constraint, number)
            case "forget", place:
                peer.matchers.pop(place, None)
            case "gather", call:
                for other in self._peers:
                    if other is not peer:
                        other.send(encode(("snapshot", peer.index, call)))
            case "snapshot", asker, call, content:
                self.send(("part", call, peer.index, content), to=asker)
            case _:
                self.orders.put(message)

    def _submit(self, peer: _Peer, jobs: Sequence[Job], name: Name) -> None:
        keys = tuple((peer.index, *job.key) for job in jobs)
        compiled = [job.matcher and peer.matchers.pop(job.matcher) for job in jobs]
        if self._names.get(name, peer.index) != peer.index:
            refused = Refused(keys, IdIsTaken())
            peer.send(
                encode(("round", packed([refused]), None, packed_load(self._worker.load), None))
            )
            return
        if len(self._peers) > 1:
            self._names[name] = peer.index
        peer.jobs.update(keys)
        triples = zip(jobs, keys, compiled, strict=True)
        self._worker.submit([replace(job, key=k, matcher=m) for job, k, m in triples], name)

    def _compile(self, peer: _Peer, call: int, constraint: Checked | None, number: int) -> None:
        """Compiles a constraint, or only reads the vocabulary. Runs in a thread of the pool."""
        answer: object = None
        try:
            if constraint is None:
                self._worker.prepare_matchers()
            else:
                for index, one in enumerate(self._worker.matchers(constraint, number)):
                    peer.matchers[call, index] = one
        except BaseException as error:  # without an answer the other process would wait
            answer = error
            if not isinstance(error, ConfigError | ConstraintsFull):
                _log.exception("a constraint cannot be compiled")
                answer = RuntimeError(repr(error))
            else:  # without its frames, which hold the constraint's lease
                answer = error.with_traceback(None)
        peer.send(encode(("answer", call, answer)))

    def _lose(self, peer: _Peer) -> None:
        peer.is_gone = True
        peer.matchers.clear()
        if peer.index == 0:
            self._on_lost()
            return
        if peer.jobs:
            count = len(peer.jobs)
            _log.error("process %d of the server is gone: %d sequences end", peer.index, count)
        for key in list(peer.jobs):
            self._worker.abort(key)
        self._names = {name: at for name, at in self._names.items() if at != peer.index}
