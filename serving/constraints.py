"""Compiles the constraints of requests, outside of the event loop and of the engine's thread.

    constraint -> checked in `grammar_process` -> compiled in a thread -> matcher of the engine

The check runs in a process of its own, whose limits of time and memory end it without harm to the server. The
result is kept for each caller: a constraint that a caller sends again is not checked again.
"""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from peagle_jax import ConfigError, Engine
from peagle_jax.engine.grammar import Grammars, Matcher
from peagle_jax.structured import MAX_CHARS, Structured
from serving import caller
from serving.bounded_pool import BoundedPool
from serving.errors import Code, ServiceError, invalid
from serving.grammar_process import CPU_SECONDS, Vocabulary

_log = logging.getLogger(__name__)
_NUM_PROCESSES = 2
_MAX_WAITING = 256
_MAX_SECONDS = 30.0
"""Longest wait for one check, on a busy machine; `grammar_process` limits its processor time."""
_NUM_REMEMBERED = 256
_MAX_REMEMBERED = 16 << 10  # characters of a definition
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of other processes, or of the kernel when memory is short. The limits of `grammar_process` end it by SIGXCPU,
SIGABRT or SIGSEGV instead."""
_TOO_COMPLEX = f"is too complex: the check of it took more than {CPU_SECONDS} s, too much memory or too much stack"


class Constraints:
    """Compiles constraints for one engine. Its threads and processes start with the first constraint.

    Args:
      engine: with or without a tokenizer.
    """

    def __init__(self, engine: Engine):
        self._grammars: Grammars | None = engine.grammars
        self._pool = BoundedPool(
            "grammar", "constraints", num_threads=_NUM_PROCESSES, max_waiting=_MAX_WAITING
        )
        self._processes = [_Process(self._vocabulary(engine)) for _ in range(_NUM_PROCESSES)]
        self._idle = list(self._processes)
        self._known: OrderedDict[tuple, str] = OrderedDict()
        self._lock = threading.Lock()
        self._preparing: asyncio.Future | None = None

    @staticmethod
    def _vocabulary(engine: Engine) -> Callable[[], Vocabulary]:
        target = engine.target_config
        return lambda: Vocabulary.of(engine.tokenizer, target.vocab_size, target.eos_ids)

    def prepare(self) -> None:
        """Reads the vocabulary in a thread, so that the first constraint does not wait for it."""
        if self._grammars is not None:
            self._preparing = asyncio.ensure_future(self._pool.run(self._read_vocabulary))

    def _read_vocabulary(self) -> None:
        try:
            self._grammars.prepare()
        except ConfigError as error:
            _log.info("constraints are not possible: %s", error.rule)

    async def compile(
        self,
        structured: Structured,
        *,
        field: str,
        number: int = 1,
        chat: Sequence[int] | None = None,
    ) -> list[Matcher]:
        """Matchers at the beginning of the constrained text, one for each of `number` sequences.

        Args:
          field: the client's name of the constraint, for errors.
          chat: the prompt, if the text is the answer of a chat and reasoning may come before it.

        Raises:
          ServiceError: INVALID_ARGUMENT that names the field; RESOURCE_EXHAUSTED if too many wait;
            UNAVAILABLE if the server ends, or can start no process.
        """
        if self._grammars is None:
            raise invalid(field, "needs a model with a tokenizer")
        size = len(structured.text) + len(structured.around)
        if size > MAX_CHARS:
            raise invalid(field, f"{size} characters are more than {MAX_CHARS}")
        if chat is not None:
            structured = self._grammars.located(structured, chat)
        try:
            # Each caller has its own cache: from the time of an answer one caller could learn what another sent.
            caller_id = caller.current()
            return await self._pool.run(lambda: self._compile(structured, number, caller_id))
        except ConfigError as error:
            raise invalid(field, error.rule) from error

    def _compile(self, structured: Structured, number: int, caller_id: str) -> list[Matcher]:
        self._grammars.prepare()
        frame = self._grammars.markers.frame(structured.reasoning)
        key = caller_id, structured.kind, structured.text, structured.around, frame
        with self._lock:
            definition = self._known.pop(key, None)
        if definition is None:
            definition = self._check(structured, frame)
        with self._lock:
            if len(definition) <= _MAX_REMEMBERED:
                self._known[key] = definition
            while len(self._known) > _NUM_REMEMBERED:
                self._known.popitem(last=False)
        matcher = self._grammars.matcher(definition)
        return [matcher, *(matcher.copy() for _ in range(number - 1))]

    def _check(self, structured: Structured, frame: str | None) -> str:
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
            raise ConfigError.of("structured", _TOO_COMPLEX)
        if "error" in answer:
            raise ConfigError.of("structured", answer["error"])
        return answer["definition"]

    def close(self) -> None:
        """Takes no more constraints and ends the processes."""
        self._pool.close()
        for process in self._processes:
            process.end()

    async def wait_closed(self, seconds: float) -> None:
        """Waits until no constraint is compiled, for at most `seconds`."""
        await self._pool.wait_closed(seconds)


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Waits for an event of `select.poll`, which takes descriptors above 1,023 as well."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


class _KilledError(Exception):
    """The process that checks constraints was killed from outside."""


class _Process:
    """A `grammar_process`, started at the first check and again after its end.

    Args:
      vocabulary: returns the first message to the process.
      command: starts the process.
      seconds: maximum time of a check, including the start.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        command: Sequence[str] = (sys.executable, "-m", "serving.grammar_process"),
        seconds: float = _MAX_SECONDS,
    ):
        self._vocabulary, self._command, self._seconds = vocabulary, command, seconds
        self._process: subprocess.Popen | None = None
        self._is_ended = False
        self._lock = threading.Lock()

    def ask(self, constraint: dict) -> dict | None:
        """The result of a check; None if the process exceeded a limit or took too long.

        A process that was killed from outside (for example while it was idle) is replaced once.

        Raises:
          ServiceError: UNAVAILABLE; the process cannot be started, was killed twice, or the server ends.
        """
        for _ in range(2):
            try:
                return self._ask(constraint)
            except _KilledError:
                _log.warning("the process that checks constraints was killed from outside")
        rule = "the process that checks constraints was killed from outside; try again"
        raise ServiceError(Code.UNAVAILABLE, rule, retry_after=1.0)

    def _ask(self, constraint: dict) -> dict | None:
        with self._lock:
            deadline = time.monotonic() + self._seconds
            try:
                if self._process is None:
                    self._start()
                    self._send(asdict(self._vocabulary()), deadline)
                self._send(constraint, deadline)
                answer = self._receive(deadline)
            except OSError:  # it ended before it had read everything, or does not read
                answer = None
            except BaseException:  # a half-written message would be read as part of the next one
                self._kill()
                raise
            was_killed = answer is None and self._was_killed(deadline)
            if answer is None or self._is_ended:
                self._kill()
        if answer is None and self._is_ended:
            raise ServiceError(Code.UNAVAILABLE, "the server shuts down; use another server")
        if was_killed:
            raise _KilledError
        return answer

    def _was_killed(self, deadline: float) -> bool:
        """Whether the process ended by a signal that no limit of its own sends."""
        # The pipe closes a moment before the process ends.
        seconds = 1.0 if time.monotonic() < deadline else 0.0
        try:
            return -self._process.wait(seconds) in _SIGNALS_FROM_OUTSIDE
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        """Ends the process, and a check that waits for its result."""
        self._is_ended = True
        process = self._process
        if process is not None:
            process.kill()
        # A thread that waits for an answer closes the pipes itself.
        if self._lock.acquire(blocking=False):
            try:
                self._kill()
            finally:
                self._lock.release()

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                bufsize=0,  # a write then takes what the pipe has room for
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for the server alone
            )
        except OSError as error:
            rule = f"the process that checks constraints cannot be started ({error})"
            _log.error("%s", rule)
            raise ServiceError(Code.UNAVAILABLE, f"{rule}; try again", retry_after=1.0) from error
        self._process = process
        if self._is_ended:
            process.kill()

    def _send(self, content: dict, deadline: float) -> None:
        """Raises `OSError` if the process does not read all of it in time."""
        rest = memoryview(json.dumps(content).encode() + b"\n")
        pipe = self._process.stdin
        while rest:
            if not _is_ready(pipe, select.POLLOUT, deadline):
                raise TimeoutError("the process does not read")
            rest = rest[os.write(pipe.fileno(), rest[: select.PIPE_BUF]) :]

    def _receive(self, deadline: float) -> dict | None:
        answer, pipe = bytearray(), self._process.stdout
        while not answer.endswith(b"\n"):
            if not _is_ready(pipe, select.POLLIN, deadline):
                return None
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                return None
            answer += part
        return json.loads(answer)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()
