"""Compiles the constraints of requests, outside of the event loop and of the engine's thread.

    constraint -> checked in `grammar_process` -> compiled by the worker, in a thread of the
    engine's process -> matcher

The check runs in a process of its own, whose limits of time and memory end it without harm to the
server. The result is kept by its digest for each caller: a constraint that a caller sends again is
not checked again, and one that was refused is refused at once. Callers take turns at the processes
and threads.
"""

import asyncio
import hashlib
import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from peagle_jax import ConfigError
from peagle_jax.engine.structured.grammar import Grammars
from peagle_jax.structured import MAX_CHARS, Structured
from peagle_jax.text import child_python
from peagle_jax.text.bounded_process import BoundedProcess, UnavailableError
from serving import caller
from serving.bounded_pool import BoundedPool
from serving.constraint_memory import ConstraintsFull
from serving.errors import Code, ServiceError, invalid, unavailable
from serving.grammar_process import CPU_SECONDS, Vocabulary
from serving.messages import Checked, Description, MatcherOf, Worker
from serving.networks import network

_NICE = 10
_MAX_SECONDS = 30.0
"""Longest wait for one check, on a busy machine; `grammar_process` limits its processor time."""


class Process(BoundedProcess):
    """A process that checks constraints.

    Args:
      vocabulary: returns the first message to the process.
      command: starts the process; None: that of `grammar_process`.
      seconds: maximum time of a check, including the start.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        command: Sequence[str] | None = None,
        seconds: float = _MAX_SECONDS,
    ):
        super().__init__(
            "the process that checks constraints",
            command or child_python.command("serving.grammar_process"),
            seconds=seconds,
            greeting=lambda: asdict(vocabulary()),
            nice=_NICE,
        )

    def ask(self, question: dict) -> dict | None:
        """The result of a check; None if the process exceeded a limit or took too long.

        Raises:
          ServiceError: UNAVAILABLE; the process cannot be started, was killed twice, or the server
            ends.
        """
        try:
            return super().ask(question)
        except UnavailableError as error:
            raise unavailable(error) from error


_log = logging.getLogger(__name__)
_NUM_PROCESSES = 2
_NUM_THREADS = 2
_MAX_WAITING = 256
_MOST_REMEMBERED = 16 << 20
"""Characters of all definitions, and of all refusals, that a process remembers."""
_EACH_REMEMBERED = 512
"""What an entry counts beside its text."""
_REFUSED_SECONDS = 300.0
"""How long a refusal is remembered. Not forever: a busy machine can be the cause of one."""
_TOO_COMPLEX = (
    f"is too complex: the check of it took more than {CPU_SECONDS} s, too much memory or too much "
    "stack"
)


class Constraints:
    """Compiles constraints for one engine. Its threads and processes start with the first
    constraint.

    Args:
      worker: runs the engine, whose model has a tokenizer or not.
    """

    def __init__(self, worker: Worker):
        engine, self._worker = worker.description, worker
        target = engine.target_config
        # It places reasoning before the answer; the vocabulary for masks is read where the engine
        # is.
        self._grammars: Grammars | None = None
        if engine.tokenizer is not None:
            self._grammars = Grammars(engine.tokenizer, target.vocab_size, target.eos_ids)
        # Two pools: a constraint that is known does not wait for the checks of others.
        self._checks = _FairPool("grammar-check", _NUM_PROCESSES)
        self._compiles = _FairPool("grammar", _NUM_THREADS)
        self._processes = [Process(self._vocabulary(engine)) for _ in range(_NUM_PROCESSES)]
        self._idle = list(self._processes)
        self._known: _Memory[Checked] = _Memory()
        self._refused: _Memory[str] = _Memory(_REFUSED_SECONDS)

    @staticmethod
    def _vocabulary(engine: Description) -> Callable[[], Vocabulary]:
        target = engine.target_config
        return lambda: Vocabulary.of(engine.tokenizer, target.vocab_size, target.eos_ids)

    def prepare(self) -> asyncio.Future:
        """Reads the vocabulary in a thread, so that the first constraint does not wait for it.
        Returns its end.
        """
        has_grammars = self._grammars is not None
        return asyncio.ensure_future(
            self._compiles.run("", self._read_vocabulary) if has_grammars else asyncio.sleep(0)
        )

    def _read_vocabulary(self) -> None:
        try:
            self._worker.prepare_matchers()
        except ConfigError as error:
            _log.info("constraints are not possible: %s", error.rule)

    async def compile(
        self,
        structured: Structured,
        *,
        field: str,
        number: int = 1,
        chat: Sequence[int] | None = None,
        address: str = "",
    ) -> list[MatcherOf]:
        """Matchers at the beginning of the constrained text, one for each of `number` sequences.

        Args:
          field: the client's name of the constraint, for errors.
          chat: the prompt, if the text is the answer of a chat and reasoning may come before it.
          address: of the client, "" if it has none; tells clients without a token apart.

        Raises:
          ServiceError: INVALID_ARGUMENT that names the field; RESOURCE_EXHAUSTED if too many of the
            client wait; UNAVAILABLE if the server ends, or can start no process.
        """
        if self._grammars is None:
            raise invalid(field, "needs a model with a tokenizer")
        size = len(structured.text) + len(structured.around)
        if size > MAX_CHARS:
            raise invalid(field, f"{size} characters are more than {MAX_CHARS}")
        if chat is not None:
            structured = self._grammars.located(structured, chat)
        frame = self._grammars.markers.frame(structured.reasoning)
        # Each caller has its own cache: from the time of an answer one caller could learn what
        # another sent.
        caller_id = caller.current()
        parts = caller_id, structured.kind, structured.text, structured.around, frame
        key = hashlib.sha256(repr(parts).encode()).digest()
        origin = caller_id or network(address)
        try:
            checked = self._recall(key, origin)
            if checked is None:
                check = lambda: self._check(key, structured, frame, origin)
                checked = await self._checks.run(origin, check)
            compiled = lambda: self._worker.matchers(checked._replace(origin=origin), number)
            return await self._compiles.run(origin, compiled)
        except ConfigError as error:
            raise invalid(field, error.rule) from error
        except ConstraintsFull as error:
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED, f"{error}; try again later", retry_after=1.0
            ) from error

    def _recall(self, key: bytes, origin: str) -> Checked | None:
        """A constraint that has been checked, of no origin; None if it has not, or is forgotten.

        Raises:
          ConfigError: the check has refused it.
        """
        rule = self._refused.get(key, origin)
        if rule is not None:
            raise ConfigError.of("structured", rule)
        return self._known.get(key, origin)

    def _check(self, key: bytes, structured: Structured, frame: str | None, origin: str) -> Checked:
        self._worker.prepare_matchers()
        # Another request of the same caller may have had it checked while this one waited.
        checked = self._recall(key, origin)
        if checked is not None:
            return checked
        process = self._idle.pop()  # as many as threads
        try:
            parts = dict(kind=structured.kind, text=structured.text, around=structured.around)
            answer = process.ask(parts | dict(frame=frame))
        finally:
            self._idle.append(process)
        if answer is None:
            _log.warning(
                "a constraint of kind %s exceeded the limits of its check", structured.kind
            )
            answer = {"error": _TOO_COMPLEX}
        if "error" in answer:
            self._refused.put(key, answer["error"], len(answer["error"]), origin)
            raise ConfigError.of("structured", answer["error"])
        checked = Checked(answer["definition"], answer["memory"], origin="")
        self._known.put(key, checked, len(checked.definition), origin)
        return checked

    def close(self) -> None:
        """Takes no more constraints and ends the processes."""
        for pool in (self._checks, self._compiles):
            pool.close()
        for process in self._processes:
            process.end()

    async def wait_closed(self, seconds: float) -> bool:
        """Waits until no constraint is compiled, for at most `seconds`; returns whether none is."""
        pools = self._checks, self._compiles
        return all(await asyncio.gather(*(pool.wait_closed(seconds) for pool in pools)))


@dataclass
class _Remembered[T]:
    """What `_Memory` keeps: a value, its size, its end, and who used it."""

    value: T
    size: int
    until: float
    owners: set[str]


class _Memory[T]:
    """What was used last, by key. Thread-safe. Where it is full, the owner of most of it loses what
    it used longest ago, so no client makes the server forget the constraints of others, even those
    that it uses itself.

    Args:
      seconds: how long it is kept.
    """

    def __init__(self, seconds: float = math.inf):
        self._seconds, self._lock = seconds, threading.Lock()
        self._entries: OrderedDict[bytes, _Remembered[T]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        """By owner; each counts all that it has used."""

    def get(self, key: bytes, owner: str) -> T | None:
        """What was put under a key; None if there is nothing, or its time is up."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if time.monotonic() >= entry.until:
                for one in tuple(entry.owners):
                    self._drop(key, one)
                return None
            self._use(key, owner)
            return entry.value

    def put(self, key: bytes, value: T, size: int, owner: str) -> None:
        """Keeps something with `size` characters."""
        until = time.monotonic() + self._seconds
        with self._lock:
            entry = _Remembered(value, size + _EACH_REMEMBERED, until, set())
            self._entries.setdefault(key, entry)
            self._use(key, owner)

    def _use(self, key: bytes, owner: str) -> None:
        self._entries.move_to_end(key)
        entry = self._entries[key]
        if owner not in entry.owners:
            entry.owners.add(owner)
            self._sizes[owner] += entry.size
        while self._sizes.total() > _MOST_REMEMBERED:
            ((largest, _),) = self._sizes.most_common(1)
            oldest = next(key for key, one in self._entries.items() if largest in one.owners)
            self._drop(oldest, largest)

    def _drop(self, key: bytes, owner: str) -> None:
        entry = self._entries[key]
        entry.owners.remove(owner)
        self._sizes[owner] -= entry.size
        self._sizes += Counter()  # forgets owners of nothing
        if not entry.owners:
            del self._entries[key]


class _FairPool:
    """A `BoundedPool` whose threads callers use in turn: one with many requests delays no other by
    all of them.

    `_MAX_WAITING` functions wait at most. Beyond that the caller with most of them loses its
    newest.
    """

    def __init__(self, name: str, num_threads: int):
        # In this pool nothing waits, because only as many functions as threads have a turn.
        self._pool = BoundedPool(
            name, "constraints", num_threads=num_threads, max_waiting=num_threads
        )
        self._num_free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}
        """By caller, the next one first. True is a turn, False a refusal."""
        self._running: Counter[str] = Counter()
        self.close, self.wait_closed = self._pool.close, self._pool.wait_closed

    async def run[T](self, origin: str, function: Callable[[], T]) -> T:
        """The result of a function in the pool, when the caller `origin` has its turn.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED if too many wait and this caller has most of them.
        """
        await self._wait_for_turn(origin)
        return await asyncio.shield(self._start(origin, function))

    def _start[T](self, origin: str, function: Callable[[], T]) -> asyncio.Task[T]:
        """Starts a function, which has its turn until it returns, even if its request
        is cancelled.
        """

        def end(work: asyncio.Task) -> None:
            if not work.cancelled():
                # of a cancelled request nothing else reads it, and asyncio would log it
                work.exception()
            self._end_turn(origin)

        work = asyncio.create_task(self._pool.run(function))
        work.add_done_callback(end)
        return work

    async def _wait_for_turn(self, origin: str) -> None:
        if self._num_free:
            self._num_free -= 1
            self._running[origin] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(origin, deque()).append(turn)
        if sum(map(len, self._waiting.values())) > _MAX_WAITING:
            self._refuse_one(origin)
        try:
            is_turn = await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(origin, turn)
            elif turn.result():  # the turn came at the same moment
                self._end_turn(origin)
            raise
        if not is_turn:
            rule = "too many constraints of this client wait for their check; try again later"
            raise ServiceError(Code.RESOURCE_EXHAUSTED, rule, retry_after=1.0)

    def _end_turn(self, origin: str) -> None:
        """Gives the turn of a caller to the next one: of those with least that runs, to
        the first.
        """
        self._running[origin] -= 1
        self._running += Counter()  # drops callers of whom nothing runs
        while self._waiting:
            origin = min(self._waiting, key=self._running.__getitem__)
            turns = self._waiting.pop(origin)
            turn = turns.popleft()
            if turns:
                self._waiting[origin] = turns  # behind all others
            if not turn.done():
                turn.set_result(True)
                self._running[origin] += 1
                return
        self._num_free += 1

    def _refuse_one(self, newest: str) -> None:
        """Refuses the last one of the caller with most that wait; of several such callers, of
        `newest`.
        """
        longest = max((newest, *self._waiting), key=lambda origin: len(self._waiting[origin]))
        turn = self._waiting[longest][-1]
        self._forget(longest, turn)
        if not turn.done():
            turn.set_result(False)

    def _forget(self, origin: str, turn: asyncio.Future) -> None:
        turns = self._waiting.get(origin, ())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[origin]
