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

from bench.progress import progress_bar
from peagle_jax.engine.device.compilation import CHILD_ENVIRONMENT

_log = logging.getLogger(__name__)
_SECONDS = 60.0
"""Limit of a case of a job in each pass; while it waits for its turn no time counts."""


class Job(NamedTuple):
    """A spec of an operation, with all tuning configs or one, with its reference or alone."""

    op: str
    spec: str
    configs: bool
    reference: bool = True


Work = Callable[[Job, Any], Iterator]
"""(job, turn) -> a result for each case; a function at the top level of a module. `turn` is a context in which no other
job runs."""


def side_by_side(
    jobs: Sequence[Job],
    processes: int,
    compile_: Work,
    measure: Work,
    seconds: float = _SECONDS,
) -> Iterator[dict]:
    """Yields the rows of all jobs as they are measured. What fails is logged and has none.

    Args:
      compile_: its results say whether the reference of a case is compiled.
      measure: its results are rows.
      seconds: limit of a case in each pass. A job that compiles for longer is measured without its reference.
    """
    ready = []
    for job, compiled, error in _run(jobs, processes, compile_, seconds, "compiling"):
        if error is not None:
            _log.warning("%s %s: measured without its reference", job.op, job.spec)
            log_failure(job.op, job.spec, error)
        has_reference = error is None and bool(compiled) and all(compiled)
        ready.append(job._replace(reference=has_reference))
    # In the order of the specs, which is that of their names in tables.
    ready.sort(key=lambda job: jobs.index(job._replace(reference=True)))
    for job, made, error in _run(ready, processes, measure, seconds, "measuring"):
        yield from made
        if error is not None:
            log_failure(job.op, job.spec, error)


def log_failure(op: str, spec: str, error: BaseException) -> None:
    """Logs the first line of an error."""
    said = str(error).splitlines() or [""]
    _log.error("%s %s: %s: %s", op, spec, type(error).__name__, said[0])


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables for processes that start within."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


@dataclass(frozen=True)
class _Turn:
    """In a process of a job: asks for the turn, and returns it."""

    parent: Connection

    def __enter__(self) -> None:
        self.parent.send(("ask", None))
        self.parent.recv()

    def __exit__(self, *_: object) -> None:
        self.parent.send(("return", None))


@dataclass(eq=False)
class _Running:
    """A process of a job.

    Attributes:
      results: those of the cases so far.
      since: from when the time of a case counts; None while it waits for its turn.
    """

    job: Job
    process: BaseProcess
    child: Connection
    results: list = field(default_factory=list)
    since: float | None = field(default_factory=time.monotonic)

    def receive(self) -> tuple[str, Any]:
        """The next message. A process that died sends none, or a part of one."""
        try:
            return self.child.recv()
        except (EOFError, OSError):
            return "end", RuntimeError("the process died")

    def is_late(self, seconds: float) -> bool:
        return self.since is not None and time.monotonic() - self.since > seconds

    def give_turn(self) -> None:
        """If the process has died, its connection says so next."""
        self.since = time.monotonic()
        with contextlib.suppress(OSError):
            self.child.send(None)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.child.close()


def _run(
    jobs: Sequence[Job], processes: int, work: Work, seconds: float, title: str
) -> Iterator[tuple[Job, list, Exception | None]]:
    """Runs jobs in processes of their own; yields each with its results, and its error if it has one, as they end."""
    waiting, running = deque(jobs), {}
    asking: deque[_Running] = deque()
    holder: _Running | None = None
    spawn = multiprocessing.get_context("spawn")

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
            ended: dict[_Running, Exception | None] = {}
            for child in wait(list(running), timeout=1.0):
                one = running[child]
                what, value = one.receive()
                one.since = None if what == "ask" else time.monotonic()
                if what == "ask":
                    asking.append(one)
                elif what == "return":
                    holder = None
                elif what == "result":
                    one.results.append(value)
                else:
                    ended[one] = value
            for one in running.values():
                if one.is_late(seconds):
                    ended.setdefault(one, TimeoutError(f"not done in {seconds:.0f} s"))
            for one, error in ended.items():
                del running[one.child]
                one.stop()
                if one in asking:
                    asking.remove(one)
                holder = None if holder is one else holder
                bar.update()
                yield one.job, one.results, error
            if holder is None and asking:
                holder = asking.popleft()
                holder.give_turn()


def _child(work: Work, job: Job, parent: Connection) -> None:
    """The process of a job: sends its results, and its error or None."""
    try:
        for result in work(job, _Turn(parent)):
            parent.send(("result", result))
    except Exception as error:
        # Any error can be pickled so.
        parent.send(("end", RuntimeError(f"{type(error).__name__}: {error}")))
    else:
        parent.send(("end", None))


def compile_job(job: Job, turn: Any) -> Iterator[bool]:
    """Compiles the cases of a job onto disk; yields for each whether its reference is compiled too."""
    from bench.kernels import Prepared

    return _cases(job, lambda case, chip: Prepared(case).reference is not None)


def measure_job(job: Job, turn: Any) -> Iterator[dict]:
    """The rows of a job, without the fields that all rows share."""
    from bench.kernels import Prepared

    def measure(case, chip: str) -> dict:
        prepared = Prepared(case, with_reference=job.reference)
        with turn:
            return prepared.measure(chip)

    return _cases(job, measure)


def _cases(job: Job, measure: Callable) -> Iterator:
    """What `measure` makes of each case of a job."""
    import jax

    from bench.kernels import rows_of
    from pallas_kernels.device import describe
    from peagle_jax.cli import runs

    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    yield from rows_of(job, describe(jax.devices()[0]), measure)
