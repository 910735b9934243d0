"""Kernels compiled side by side and measured one at a time (`python -m lab kernels --jobs`).

Tracing and compiling take seconds of a CPU for each spec, and measuring takes less. Each spec has a
process of its own, twice: first all specs are compiled onto disk, then each is measured while no
other uses the GPU. XLA also runs kernels when it compiles a reference, to choose the fastest, so
nothing compiles for the first time while a spec is measured. A process returns its memory of the
GPU when it ends.

XLA compiles some references for minutes, or fails. Such a spec is measured without its reference.
"""

import contextlib
import fcntl
import logging
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

_log = logging.getLogger(__name__)
_SECONDS = 60
"""Limit of a job in each pass; while it waits for its turn no time counts."""


class Job(NamedTuple):
    """A spec of an operation, with its reference or alone."""

    op: str
    spec: str
    reference: bool = True


Function = Callable[[Job, contextlib.AbstractContextManager], Any]
"""(job, turn) -> a result; at the top level of a module. `turn` is a context in which no other job
runs."""


def side_by_side(
    jobs: Sequence[Job],
    processes: int,
    compile_: Function,
    measure: Function,
    seconds: int = _SECONDS,
) -> Iterator[dict]:
    """Yields the rows of all jobs, in their order. What fails is logged and has none.

    Args:
      compile_: its result says whether the references of a job are compiled.
      measure: its result is a list of rows.
      seconds: limit of a job in each pass. One that compiles for longer is measured without its
        reference.
    """
    ready = []
    for job, has_reference in _run(jobs, processes, compile_, seconds, "compiling"):
        if has_reference is None:
            _log.warning("%s %s: measured without its reference", job.op, job.spec)
        ready.append(job._replace(reference=bool(has_reference)))
    for _, some in _run(ready, processes, measure, seconds, "measuring"):
        yield from some or ()


def log_failure(op: str, spec: str, error: BaseException) -> None:
    """Logs the first line of an error."""
    said = str(error).splitlines() or [""]
    _log.error("%s %s: %s: %s", op, spec, type(error).__name__, said[0])


def _run(
    jobs: Sequence[Job], processes: int, function: Function, seconds: int, title: str
) -> Iterator[tuple[Job, Any]]:
    """Runs jobs in processes of their own; yields each with its result, None where it failed."""
    context = multiprocessing.get_context("spawn")

    def run(job: Job) -> Any:
        received, sent = context.Pipe(duplex=False)
        given = (function, job, Path(lock.name), seconds, sent)
        process = context.Process(target=_child, args=given)
        process.start()
        sent.close()  # so that the end of the process ends the pipe
        try:
            return received.recv()
        except EOFError:
            return RuntimeError(f"died, or not done in {seconds} s")
        finally:
            process.join()

    with (
        tempfile.NamedTemporaryFile() as lock,
        ThreadPoolExecutor(processes) as pool,
        tqdm(desc=title, total=len(jobs), unit="spec", disable=None) as bar,
    ):
        for job, result in zip(jobs, pool.map(run, jobs), strict=True):
            if is_failure := isinstance(result, Exception):
                log_failure(job.op, job.spec, result)
            bar.update()
            yield job, None if is_failure else result


class _Turn:
    """Holds a lock on a file, which the system releases if the process dies, and stops the clock
    while it waits."""

    def __init__(self, path: Path, seconds: int):
        self._path, self._seconds = path, seconds

    def __enter__(self) -> None:
        signal.alarm(0)
        self._file = self._path.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        signal.alarm(self._seconds)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _child(
    function: Function, job: Job, lock: Path, seconds: int, result: connection.Connection
) -> None:
    """In the process of a job, which the alarm ends if it takes too long."""
    signal.alarm(seconds)
    try:
        result.send(function(job, _Turn(lock, seconds)))
    except Exception as error:  # any error can be pickled so
        result.send(RuntimeError(f"{type(error).__name__}: {error}"))
