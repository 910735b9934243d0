"""The server's side of `grammar_process`: it starts the process, asks it, and starts another after its end."""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

from peagle_jax import child_python
from serving.errors import Code, ServiceError
from serving.grammar_process import Vocabulary

_log = logging.getLogger(__name__)
_MAX_SECONDS = 30.0
"""Longest wait for one check, on a busy machine; `grammar_process` limits its processor time."""
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of other processes, or of the kernel when memory is short. The limits of `grammar_process` end it by SIGXCPU,
SIGABRT or SIGSEGV instead."""


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Waits for an event of `select.poll`, which takes descriptors above 1,023 as well."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


class _KilledError(Exception):
    """The process that checks constraints was killed from outside."""


class Process:
    """A `grammar_process`, started at the first check and again after its end.

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
        self._vocabulary, self._seconds = vocabulary, seconds
        self._command = command or child_python.command("serving.grammar_process")
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
