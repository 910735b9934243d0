"""Compiles the programs of engines in child processes, onto disk; the process that runs an engine
loads them.

Tracing, lowering and serialising hold Python's lock, some calls for seconds, so threads neither
compile side by side nor leave the process that serves alone. A child (`compiler_process`) gets the
shapes of the weights, never the weights: it needs the memory of a device's context and of one
program.

    compile_missing(recipes)        child 1: key, key, ..      each child one program at a time
      queue of (recipe, key) ---->  child 2: key, ..           onto disk (`stored_programs`)

A process that has no engine gives makers of engines of shapes as recipes, and the children first
list what is missing.
"""

import collections
import contextlib
import io
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch
from peagle_jax.config import ConfigError, DrafterConfig, EngineConfig, TargetConfig
from peagle_jax.cores import num_cores
from peagle_jax.engine.device import stored_programs
from peagle_jax.engine.device.memory import free_host_bytes
from peagle_jax.engine.device.program import Program
from peagle_jax.method.step import AcceptRule
from peagle_jax.text import child_python

_log = logging.getLogger(__name__)

CHILD_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

_HOST_BYTES = 3 * 2**30
"""Memory of the host that a child takes while it compiles a large program, at most."""

_DEVICE_BYTES = 3 * 2**29
"""Memory of a device that a child takes: its context, and what XLA's autotuner allocates."""

_ATTEMPTS = 2
"""How often a program is tried whose child dies."""

_LOW_PRIORITY = 10  # as of `nice`
_POLL_SECONDS = 0.2
_END_SECONDS = 5.0


class CompileError(ConfigError):
    """A program cannot be compiled; the message names it and has the compiler's first line."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the programs of an engine; in place of weights there are shapes. It can be
    pickled.

    Args:
      target, drafter: models with `jax.ShapeDtypeStruct` in place of arrays.
      config: with all sizes chosen, as `Engine.config` has it.
    """

    target: Any
    drafter: Any
    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    config: EngineConfig
    taps: tuple[int, ...]
    accept: AcceptRule


def named(one: Program | None) -> str:
    """A program's name for people; of None "the list of programs"."""
    return "the list of programs" if one is None else str(one)


Maker = Callable[[], tuple[Any, Any, Sequence[Program]]]
"""A recipe that can be pickled too: -> the `Programs` of an engine of shapes, their state, and the
keys of those that it needs. Children call it."""


class Setup(NamedTuple):
    """The first message to a child."""

    recipes: bytes
    cache: str | None
    """The folder of jax's own cache."""
    settings: dict[str, Any]
    """jax's settings, which are part of the key of a program."""


class Failure(NamedTuple):
    """Why a program is not on disk."""

    reason: str
    is_final: bool = True
    """Whether another process would not do better: the compiler refuses the program, or died of it
    twice."""


class Progress(NamedTuple):
    """How far the programs of a call of `compile_missing` are."""

    done: int
    total: int
    seconds: float

    def __str__(self) -> str:
        line = f"compiled {self.done} of {self.total} programs, {self.seconds:.0f} s"
        if not 0 < self.done < self.total:
            return line
        left = self.seconds * (self.total - self.done) / self.done
        return f"{line}, about {left:.0f} s left"


class Job(NamedTuple):
    """A message to a child: a program to compile, or without a key a recipe whose missing programs
    it lists, each a key and a file."""

    recipe: int
    key: Program | None = None
    file: str | None = None
    """The program's, if a child has listed it."""


def compile_missing(
    recipes: Sequence[Recipe | Maker],
    missing: Sequence[Sequence[Program] | None],
    *,
    jobs: int | None = None,
    has_low_priority: bool = False,
    must_end: Callable[[], bool] = lambda: False,
    report: Callable[[Progress], None] = lambda progress: None,
    on_done: Callable[[int, Program], None] = lambda recipe, key: None,
    on_ready: Callable[[int], object] = lambda recipe: None,
) -> dict[tuple[int, Program | None], Failure]:
    """Compiles programs onto disk, in child processes.

    Args:
      missing: for each recipe the keys of the programs to compile; None for a `Maker`.
      jobs: most processes; None: `default_jobs`.
      has_low_priority: whether the children leave the processor to others.
      must_end: whether to stop; it is called several times a second. Programs that are not compiled
        then are left out.
      report: called from one thread at a time, at the start and after each program.
      on_done: called likewise with the recipe's number and the key of each program that is on disk.
      on_ready: called likewise with a recipe's number once all its programs are on disk or cannot
        be.

    Returns:
      Programs that did not get onto disk, those of equal files once; with the key None recipes
      without a list.
    """
    todo = [
        Job(number, key)
        for number, keys in enumerate(missing)
        for key in ([None] if keys is None else keys)
    ]
    if not todo:
        return {}
    setup = pickle.dumps(_setup(recipes))
    run = _Run(setup, todo, has_low_priority, must_end, report, on_done, on_ready)
    count = jobs or default_jobs(has_low_priority=has_low_priority)
    threads = [
        threading.Thread(target=run.work, name=f"compiler {number}", daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return run.failed


def default_jobs(*, has_low_priority: bool = False) -> int:
    """Processes that compile side by side: one for each core, with low priority for every other, as
    far as memory allows."""
    jobs = num_cores()
    if has_low_priority:
        jobs //= 2
    rooms = [(free_host_bytes(), _HOST_BYTES)]
    if dispatch.platform() == "cuda":
        rooms.append((_free_device_bytes(), _DEVICE_BYTES))
    for free, each in rooms:
        if free is not None:
            jobs = min(jobs, free // each)
    return max(1, jobs)


class _Run:
    """One call of `compile_missing`: the queue, and what the threads of the children share."""

    def __init__(self, setup, todo, has_low_priority, must_end, report, on_done, on_ready):
        self._setup, self._has_low_priority, self._must_end = setup, has_low_priority, must_end
        self._report, self._on_done, self._on_ready = report, on_done, on_ready
        self._todo, self._start = collections.deque(todo), time.monotonic()
        self._left = collections.Counter(job.recipe for job in todo)
        self._total, self._done = sum(job.key is not None for job in todo), 0
        self._changed = threading.Condition()
        self._listing: set[Job] = set()
        """Lists that children make: jobs may come of them."""
        self._equal: dict[str, list[Job]] = {}
        """Jobs by file; the first of a file compiles it for all."""
        self._attempts: collections.Counter[Job] = collections.Counter()
        self.failed: dict[tuple[int, Program | None], Failure] = {}
        report(self._progress())

    def work(self) -> None:
        """Starts a child and gives it programs until none is left; a child that died is
        replaced."""
        child = job = None
        try:
            while (job := self._next()) is not None:
                try:
                    child = child or _Child(self._setup, self._has_low_priority)
                except OSError as error:  # no memory, or too many processes or files
                    self._ended(job, Failure(f"no process starts: {error}", is_final=False))
                    continue
                try:
                    answer = child.ask(job, self._must_end)
                except _MustEnd:
                    return
                except _Died as died:
                    child = None
                    self._attempts[job] += 1
                    if self._attempts[job] < _ATTEMPTS:
                        _log.warning("%s; %s is tried once more", died, named(job.key))
                        with self._changed:
                            self._todo.appendleft(job)
                        continue
                    answer = Failure(f"{died}, twice")
                self._ended(job, answer)
        finally:
            if child is not None:
                child.close()
            with self._changed:  # after an error too, or the others would wait for this list
                self._listing.discard(job)
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            while (self._todo or self._listing) and not self._must_end():
                if self._todo:
                    job = self._todo.popleft()
                    if job.key is None:
                        self._listing.add(job)
                    return job
                self._changed.wait(_POLL_SECONDS)
            return None

    def _ended(self, job: Job, answer: list[tuple[Program, str]] | Failure | None) -> None:
        with self._changed:
            self._done += job.key is not None
            if isinstance(answer, Failure):
                self.failed[job.recipe, job.key] = answer
            elif job.key is None:
                self._left[job.recipe] += len(answer)
                for key, file in answer:
                    self._add(Job(job.recipe, key, file))
            for one in self._equal.pop(job.file, [job]):
                if answer is None:
                    self._on_done(one.recipe, one.key)
                self._left[one.recipe] -= 1
                if not self._left[one.recipe]:
                    self._on_ready(one.recipe)
            self._report(self._progress())
            self._listing.discard(job)
            self._changed.notify_all()

    def _add(self, job: Job) -> None:
        if job.file not in self._equal:
            self._todo.append(job)
            self._total += 1
        self._equal.setdefault(job.file, []).append(job)

    def _progress(self) -> Progress:
        return Progress(self._done, self._total, time.monotonic() - self._start)


class _MustEnd(Exception):
    """The call of `compile_missing` must end."""


class _Died(Exception):
    """A child has ended; the message says how."""


class _Child:
    """A process that compiles programs, one at a time."""

    def __init__(self, setup: bytes, has_low_priority: bool):
        self._connection, end = Pipe()
        numbers = str(end.fileno()), str(os.getpid())
        command = child_python.command("peagle_jax.engine.device.compiler_process", *numbers)
        with end:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[end.fileno()],
                # A terminal's interrupt is for the parent, whose end ends the child. No session of
                # its own: `nice` counts within a session alone.
                process_group=0,
                env=child_python.environment() | CHILD_ENVIRONMENT,
            )
        if has_low_priority:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOW_PRIORITY)
        with contextlib.suppress(OSError):  # `ask` finds out
            self._connection.send_bytes(setup)

    def ask(
        self, job: Job, must_end: Callable[[], bool]
    ) -> list[tuple[Program, str]] | Failure | None:
        """Compiles a program onto disk, or lists those of a recipe. Returns the list, or why there
        is nothing.

        Raises:
          _Died: the process ended meanwhile.
          _MustEnd: `must_end` said so meanwhile; the process is killed.
        """
        try:
            self._connection.send_bytes(pickle.dumps(job))
            while not self._connection.poll(_POLL_SECONDS):
                if must_end():
                    self._process.kill()
                    raise _MustEnd
            return pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            self._connection.close()
            code = self._end()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise _Died(f"a compiling process ended with {how}") from None

    def close(self) -> None:
        """Ends the process; it waits for nothing, since all its programs are done."""
        self._connection.close()
        self._end()

    def _end(self) -> int:
        """The exit code of a process whose connection is closed; one that hangs in its end is
        killed."""
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _setup(recipes: Sequence[Recipe | Maker]) -> Setup:
    return Setup(
        pickled(list(recipes)),
        jax.config.jax_compilation_cache_dir,
        dict(stored_programs.settings()),
    )


class _Pickler(pickle.Pickler):
    """Pickles jitted functions of modules by name, and devices by platform and id."""

    def reducer_override(self, thing):
        """Pickle's hook: the name of a jitted function, which pickle alone would take apart."""
        if type(thing) is type(jax.nn.silu):
            return thing.__qualname__
        return NotImplemented

    def persistent_id(self, thing):
        """Pickle's hook: what stands for an object that only its process has."""
        return (thing.platform, thing.id) if isinstance(thing, jax.Device) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, key):
        """Pickle's hook: the device of a platform and an id."""
        platform, number = key
        return next(one for one in jax.devices(platform) if one.id == number)


def pickled(thing: Any) -> bytes:
    """Models, drafters and rules for another process, which reads them with `unpickle`.

    Raises:
      PicklingError: of a part that no module names, such as a function within a function.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    except (AttributeError, TypeError) as error:  # which pickle raises for some of them
        raise pickle.PicklingError(str(error)) from error
    return stream.getvalue()


def unpickle(pickled: bytes) -> Any:
    """What `pickled` took."""
    return _Unpickler(io.BytesIO(pickled)).load()


def messages(connection: Connection) -> Iterator[Any]:
    """What the parent sends, until it ends."""
    while True:
        try:
            yield pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return


def _free_device_bytes() -> int | None:
    """Free memory of the fullest GPU, beside what this process has taken; None where nothing
    tells."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [command, *query], capture_output=True, text=True, timeout=20, check=True
        )
        return min(int(line) for line in answer.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
