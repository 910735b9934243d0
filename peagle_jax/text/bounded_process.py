"""A child process for work that may take any time or memory, such as a program of a model's author
or of a client.

    parent: BoundedProcess.ask(question) -- one line of JSON --> child: answer_all(answer, ...)
                                         <-- one line of JSON --

The kernel ends a child that exceeds a limit; the parent starts another one for the next question.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from peagle_jax.errors import ConfigError
from peagle_jax.text import child_python

_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of other processes, or of the kernel when memory is short. The limits of a child end it
by SIGXCPU, SIGABRT or SIGSEGV instead."""


class UnavailableError(ConfigError):
    """There is no answer, and the question is not the reason.

    Attributes:
      is_ended: whether `BoundedProcess.end` or `interrupt` is the reason.
    """

    def __init__(self, message: str, *, is_ended: bool = False):
        super().__init__(message)
        self.is_ended = is_ended


class _KilledError(Exception):
    """The process was killed from outside."""


class BoundedProcess:
    """A child process, started at the first question and again after its end. It answers one
    question at a time.

    Args:
      what: name of the process, for messages.
      command: starts it, see `child_python.command`.
      seconds: maximum time of an answer on a busy machine, including the start. The child limits
        its processor time.
      greeting: returns the first message after each start; None: there is none.
      nice: how much it leaves the processor to others, from its start on.
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        *,
        seconds: float,
        greeting: Callable[[], object] | None = None,
        nice: int = 0,
    ):
        self._nice = nice
        self._what, self._command, self._seconds = what, command, seconds
        self._greeting = greeting
        self._process: subprocess.Popen | None = None
        self._num_ends = 0
        self._lock = threading.Lock()

    def ask(self, question: object) -> Any:
        """The answer, both as JSON values; None if the process exceeded a limit or took too long.

        A process that was killed from outside (for example while it was idle) is replaced once.

        Raises:
          UnavailableError: the process cannot be started, was killed twice, or was ended.
        """
        num_ends, line = self._num_ends, _line(question)
        for _ in range(2):
            with contextlib.suppress(_KilledError):
                return self._ask(line, num_ends)
        raise UnavailableError(f"{self._what} was killed from outside; try again")

    def end(self) -> None:
        """Ends the process; questions that wait for an answer raise `UnavailableError`."""
        self._num_ends += 1
        process = self._process
        if process is not None:
            process.kill()
        # A thread that waits for an answer closes the pipes itself.
        if self._lock.acquire(blocking=False):
            try:
                self._kill()
            finally:
                self._lock.release()

    def interrupt(self) -> None:
        """`end`, unless the process is idle."""
        if self._lock.locked():
            self.end()

    def _ask(self, line: bytes, num_ends: int) -> Any:
        with self._lock:
            deadline = time.monotonic() + self._seconds
            try:
                self._check(num_ends)
                if self._process is None:
                    self._start()
                    self._check(num_ends)
                    if self._greeting is not None:
                        self._send(_line(self._greeting()), deadline)
                self._send(line, deadline)
                answer = self._receive(deadline)
            except OSError:  # it ended before it had read everything, or does not read
                answer = None
            except BaseException:  # a half-written message would be read as part of the next one
                self._kill()
                raise
            was_killed = answer is None and self._was_killed(deadline)
            if answer is None or self._num_ends != num_ends:
                self._kill()
        if answer is None:
            self._check(num_ends)
        if was_killed:
            raise _KilledError
        return answer

    def _check(self, num_ends: int) -> None:
        if self._num_ends != num_ends:
            raise UnavailableError(f"{self._what} was ended", is_ended=True)

    def _was_killed(self, deadline: float) -> bool:
        """Whether the process ended by a signal that no limit of its own sends."""
        # The pipe closes a moment before the process ends.
        seconds = 1.0 if time.monotonic() < deadline else 0.0
        try:
            return -self._process.wait(seconds) in _SIGNALS_FROM_OUTSIDE
        except subprocess.TimeoutExpired:
            return False

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                bufsize=0,  # a write then takes what the pipe has room for
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_python.environment(),
                # An interrupt at the terminal is for the parent alone. A session of its own would
                # be a group of Linux's scheduler, within which alone `nice` counts.
                process_group=0,
            )
        except OSError as error:
            rule = f"{self._what} cannot be started ({error}); try again"
            raise UnavailableError(rule) from error
        with contextlib.suppress(ProcessLookupError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, own + self._nice)
        os.set_blocking(self._process.stdin.fileno(), False)

    def _send(self, line: bytes, deadline: float) -> None:
        """Raises `OSError` if the process does not read all of it in time."""
        rest, pipe = memoryview(line), self._process.stdin
        while rest:
            if not _is_ready(pipe, select.POLLOUT, deadline):
                raise TimeoutError("the process does not read")
            rest = rest[os.write(pipe.fileno(), rest) :]

    def _receive(self, deadline: float) -> Any:
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


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Waits for an event of `select.poll`, which takes descriptors above 1,023 as well."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def limit_time(seconds: int) -> None:
    """Limits the processor time of this process from now on, to `seconds` or at most one more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def limit_memory(memory: int) -> None:
    """Limits the address space of this process to what it has now and `memory` bytes."""
    with contextlib.suppress(FileNotFoundError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _set_soft(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)


def answer_all(answer: Callable[[Any], object]) -> None:
    """Answers the questions of the parent, in the child, until the parent ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
        # What is left of this answer's time would have to do for reading the next question.
        _set_soft(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


def _set_soft(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    if most == resource.RLIM_INFINITY or (hard != resource.RLIM_INFINITY and most > hard):
        most = hard
    resource.setrlimit(which, (most, hard))
