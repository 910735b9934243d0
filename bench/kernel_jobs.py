"""Kernels compiled side by side and measured one at a time (`peagle-bench kernels --jobs`).

Tracing and compiling take seconds of a CPU for each spec, and measuring takes less. Each spec has a process of its own,
twice: first all specs are compiled onto disk, then each is measured while no other uses the GPU. XLA also runs kernels
when it compiles a reference, to choose the fastest, so nothing compiles for the first time while a spec is measured. A
process returns its memory of the GPU when it ends.

XLA compiles some references for minutes, or fails. Such a spec is measured without its reference.
"""

import contextlib
import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from bench.compile_cells import CHILD_ENVIRONMENT, environment
from bench.progress import progress_bar

_log = logging.getLogger(__name__)
_SECONDS = 60.0
"""Limit of a job in each pass; while it waits for its turn no time counts."""


class Job(NamedTuple):
    """A spec of an operation, with all tuning configs or one, with its reference or alone."""

    op: str
    spec: str
    configs: bool
    reference: bool = True


Work = Callable[[Job, Any], Any]
"""(job, turn) -> result; a function at the top level of a module. `turn` is a context in which no other job runs."""


def side_by_side(
    jobs: Sequence[Job],
    processes: int,
    compile_: Work,
    measure: Work,
    seconds: float = _SECONDS,
) -> Iterator[dict]:
    """Yields the rows of all jobs as they are measured; a job that fails is logged and has none.

    Args:
      compile_: its result says whether the reference is compiled.
      measure: its result is a list of rows.
      seconds: limit of a job in each pass. A job that compiles for longer is measured without its reference.
    """
    ready = []
    for job, has_reference in _run(jobs, processes, compile_, seconds, "compiling"):
        if isinstance(has_reference, TimeoutError):
            _log.warning("%s %s: not compiled in %.0f s: measured alone", *job[:2], seconds)
        ready.append(job._replace(reference=has_reference is True))
    # In the order of the specs, which is that of their names in tables.
    ready.sort(key=lambda job: jobs.index(job._replace(reference=True)))
    for job, made in _run(ready, processes, measure, seconds, "measuring"):
        if isinstance(made, Exception):
            log_failure(*job[:2], made)
        else:
            yield from made


def log_failure(op: str, spec: str, error: BaseException) -> None:
    """Logs the first line of an error."""
    said = str(error).splitlines() or [""]
    _log.error("%s %s: %s: %s", op, spec, type(error).__name__, said[0])


@dataclass(frozen=True)
class _Turn:
    """In a process of a job: asks for the turn, and returns it."""

    parent: Connection

    def __enter__(self) -> None:
        self.parent.send(("ask", None))
        self.parent.recv()

    def __exit__(self, *_: object) -> None:
        self.parent.send(("return", None))


@dataclass
class _Running:
    """A process of a job.

    Attributes:
      since: from when its time counts; None while it waits for its turn.
    """

    job: Job
    process: BaseProcess
    child: Connection
    since: float | None = field(default_factory=time.monotonic)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.child.close()


def _run(
    jobs: Sequence[Job], processes: int, work: Work, seconds: float, title: str
) -> Iterator[tuple[Job, Any]]:
    """Runs jobs in processes of their own; yields each with its result, or its error, as they end."""
    waiting, running, asking = deque(jobs), {}, deque()
    spawn, holder = multiprocessing.get_context("spawn"), None

    def start(job: Job) -> None:
        child, parent = spawn.Pipe()
        process = spawn.Process(target=_child, args=(work, job, parent), daemon=True)
        process.start()
        parent.close()  # so that the end of the process ends the connection
        running[child] = _Running(job, process, child)

    with (
        contextlib.ExitStack() as at_exit,
        environment(CHILD_ENVIRONMENT),
        progress_bar(desc=title, total=len(jobs), unit="spec") as bar,
    ):
        at_exit.callback(lambda: [one.stop() for one in running.values()])
        while waiting or running:
            while waiting and len(running) < processes:
                start(waiting.popleft())
            ended = {}
            for child in wait(list(running), timeout=1.0):
                one = running[child]
                try:
                    what, value = child.recv()
                except EOFError:
                    what, value = "end", RuntimeError("the process died")
                if what == "ask":
                    one.since = None
                    asking.append(one)
                elif what == "return":
                    holder = None
                else:
                    ended[child] = value
            now = time.monotonic()
            for child, one in running.items():
                if one.since is not None and now - one.since > seconds and child not in ended:
                    ended[child] = TimeoutError(f"not done in {seconds:.0f} s")
            for child, value in ended.items():
                one = running.pop(child)
                one.stop()
                holder = None if holder is one else holder
                bar.update()
                yield one.job, value
            if holder is None and asking:
                holder = asking.popleft()
                holder.since = now
                holder.child.send(None)


def _child(work: Work, job: Job, parent: Connection) -> None:
    """The process of a job: sends its result or its error."""
    try:
        result = work(job, _Turn(parent))
    except Exception as error:
        result = RuntimeError(f"{type(error).__name__}: {error}")  # any error can be pickled so
    parent.send(("end", result))


def compile_job(job: Job, turn: Any) -> bool:
    """Compiles all cases of a job onto disk. Returns whether all references are compiled too."""
    from bench.kernels import Prepared

    prepared = list(_cases(job, lambda case, chip: Prepared(case)))
    return all(one.reference is not None for one in prepared)


def measure_job(job: Job, turn: Any) -> list[dict]:
    """The rows of a job, without the fields that all rows share."""
    from bench.kernels import Prepared

    def measure(case, chip: str) -> dict:
        prepared = Prepared(case, with_reference=job.reference)
        with turn:
            return prepared.measure(chip)

    return list(_cases(job, measure))


def _cases(job: Job, measure: Callable) -> Iterator:
    """What `measure` makes of each case of a job."""
    import jax

    from bench.kernels import rows_of
    from pallas_kernels.device import describe
    from peagle_jax import runs

    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    yield from rows_of(job, describe(jax.devices()[0]), measure)
