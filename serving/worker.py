"""Runs the engine in a thread of its own. No other thread may use the engine while the worker runs.

    event loop                         engine thread
    submit, abort -> mailbox ------>   between two calls: take all mail, then engine.step()
    deliver(batch of events) <------   one call_soon_threadsafe per call, whatever its size

A call of light models has several rounds. Mail is read between calls, so an abort frees its pages
within one. If requests have ended and the queue is empty, the worker waits a short time for the
next requests of the same clients. The device computes the dispatched round meanwhile.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

from peagle_jax import ConfigError, Engine
from peagle_jax.checkpoint.incoming import loaded
from peagle_jax.cli import runs
from peagle_jax.engine.device.compilation import CompileError, Progress
from peagle_jax.engine.device.memory import device_memory
from peagle_jax.engine.device.outputs import OnUpdate
from peagle_jax.engine.device.program import Program
from peagle_jax.engine.host.pages import Salt
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.scheduler import QueueFull
from peagle_jax.engine.host.stats import Acceptance, DeviceMemory
from peagle_jax.engine.structured.grammar import Matcher
from peagle_jax.errors import NotReady
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from serving.constraint_memory import ConstraintMemory
from serving.memory import c_library_trim
from serving.messages import (
    Checked,
    Control,
    Death,
    Description,
    Ended,
    Event,
    Job,
    Listener,
    Load,
    Refused,
    Tokens,
    WeightUpdate,
)

_LONGEST_PAUSE = 1.5
"""Seconds between two readings that count; a process that runs reads the clock every second."""


class RunClock:
    """Seconds that this process has run since the clock was made. Any thread may read it; one must,
    every second.

    Args:
      clock: a clock that goes on while the process does not run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._seconds, self._read = 0.0, clock()

    def now(self) -> float:
        """The time."""
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._read, _LONGEST_PAUSE)
            self._read = now
            return self._seconds


_log = logging.getLogger(__name__)
_LOG_SECONDS = 5.0
_PATIENCE = 0.25
"""Longest wait for new requests, as a share of a round; the rest of the round is for planning the
next.
"""


_TIME_IDLE = ("time idle",)
"""Mail: another round is compiled, whose time may be missing."""


class ProgressLog:
    """Logs how far compilation is, at the start, at the end, and at most once in `_LOG_SECONDS`."""

    def __init__(self):
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        is_end = progress.done == progress.total
        if is_end or progress.seconds >= self._next:
            _log.info("%s", progress)
            self._next = progress.seconds + _LOG_SECONDS


def _caller(loop: asyncio.AbstractEventLoop) -> Callable[..., None]:
    """Calls functions in an event loop, from another thread, as long as the loop runs."""

    def call(function: Callable, *args) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: no stream is left to deliver to
            _log.debug("the event loop ended before the engine")

    return call


def _portable(error: Exception) -> Exception:
    """An error as another process takes it, without its frames; one that is no mistake of the
    caller is logged.
    """
    if isinstance(error, ConfigError | NotReady):
        return error.with_traceback(None)
    _log.error("the weights stay as they are", exc_info=error)
    return RuntimeError(f"{type(error).__name__}: {error}")


class EngineWorker:
    """Runs an engine in a daemon thread: `messages.Worker` in the process of the engine.

    Args:
      engine: not yet warm; the worker owns it from `start` on.
      waits_for_all: whether requests are served once all programs are loaded; else once the largest
        batch is compiled, and the others compile beside requests.
      before_ready: called in the engine's thread when it is warm, before requests can be served.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        waits_for_all: bool = False,
        before_ready: Callable[[], None] = lambda: None,
    ):
        self._before_ready = before_ready
        self._reading = threading.Lock()
        self._engine, self._waits_for_all = engine, waits_for_all
        self._grammars = engine.grammars
        parts = engine.config, engine.target_config, engine.drafter_config, engine.tokenizer
        self.description = Description(*parts)
        self._mail: queue.SimpleQueue = queue.SimpleQueue()
        self._running: dict[Hashable, Request] = {}
        self._constraint_memory = ConstraintMemory()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._compiler = threading.Thread(target=self._compile, name="compiler", daemon=True)
        self._updates: list[tuple[WeightUpdate, tuple, Callable]] = []
        """Orders whose weights are read, in order; the first may wait for requests that run."""
        self._is_stopping = False
        self._rounds, self._sequence_seconds, self._num_tokens = 0, 0.0, 0
        self._num_vacated = 0  # slots that became free in the last round
        self._patience = 0.0  # seconds to wait for requests that fill them
        # Counts of the warm-up, which are not reported.
        self._before = Acceptance()
        self._prefix_before = 0, 0
        self.load = self._measure()
        self._clock = RunClock()
        self._busy_since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Read it every second."""
        now, since = self._clock.now(), self._busy_since
        return 0.0 if since is None else now - since

    @property
    def batch_sizes_pending(self) -> int:
        return len(self._engine.programs.sizes_missing)

    @property
    def device_memory(self) -> Mapping[int, DeviceMemory]:
        return device_memory(self._engine.config.tensor_parallel)

    def start(self, listener: Listener, call: Callable[..., object] | None = None) -> None:
        """Starts the thread, which compiles first.

        Args:
          call: calls a function with its arguments for the listener, from the engine's thread;
            None: in the event loop of the caller.
        """
        if call is None:
            call = _caller(asyncio.get_running_loop())
        self._call, self._deliver = call, listener.deliver
        self._on_ready, self._on_death = listener.on_ready, listener.on_death
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        self._mail.put(("submit", tuple(jobs)))

    def abort(self, key: Hashable) -> None:
        self._mail.put(("abort", key))

    def flush_prefix_cache(self, salt: Salt, on_done: Callable[[int], None]) -> None:
        self._mail.put(("flush", salt, on_done))

    def control(self, order: Control, on_done: Callable[[str | Exception], None]) -> None:
        if isinstance(order, WeightUpdate):
            threading.Thread(target=self._read, args=(order, on_done), daemon=True).start()
        else:
            self._mail.put((order, on_done))

    def prepare_matchers(self) -> None:
        self._grammars.prepare()

    def matchers(self, constraint: Checked, number: int) -> list[Matcher]:
        """Any thread may call it."""
        # The memory is taken first: what is refused must not be compiled.
        lease = self._constraint_memory.lease(constraint.origin, constraint.memory)
        matcher = self._grammars.matcher(constraint.definition)
        matcher.lease = lease
        return [matcher, *(matcher.again() for _ in range(number - 1))]

    def stop(self, timeout: float) -> bool:
        """Ends the thread after its round.

        Returns:
          Whether both threads ended within `timeout` seconds: the engine's, and the one that
          compiles.
        """
        self._is_stopping = True
        done = threading.Event()
        self._mail.put(("stop", done))
        has_ended = not self._thread.is_alive() or done.wait(timeout)
        return has_ended and not self._compiler.is_alive()

    def join(self) -> None:
        """Waits for both threads after `stop`: an interpreter that exits while one compiles
        aborts.
        """
        for thread in (self._thread, self._compiler):
            if thread.is_alive():
                thread.join()

    def _post(self, function: Callable, *args) -> None:
        self._call(function, *args)

    def _run(self) -> None:
        try:
            if self._waits_for_all:
                self._warm_up_all()
                if self._is_stopping:
                    return
            else:
                # The largest batch serves any number of requests, so clients do not wait for the
                # others.
                self._engine.warm_up(sizes=self._engine.config.batch_buckets[-1:])
            self._busy_since = self._clock.now()
            runs.first_rounds(self._engine)
            self._busy_since = None
            self._before_ready()
            self._before = self._engine.scheduler.acceptance
            prefixes = self._engine.scheduler.prefixes
            self._prefix_before = prefixes.num_queried, prefixes.num_found
            self._compiler.start()
            self._post(self._on_ready)
            while self._step():
                pass
        except BaseException as error:
            if isinstance(error, CompileError):
                _log.error("%s", error)
            else:
                _log.exception("the engine died")
            self._busy_since = None
            self._post(self._on_death, Death.of(error))

    def _warm_up_all(self) -> None:
        """Loads all programs; those that are not on disk are compiled there first."""
        engine, log = self._engine, ProgressLog()
        engine.compile_missing(report=log, must_end=lambda: self._is_stopping)
        if self._is_stopping:
            return
        begin = time.monotonic()
        engine.warm_up()
        engine.run_once()
        if self._grammars is not None:
            with contextlib.suppress(ConfigError):  # the first constraint reports it
                self._grammars.prepare()
        seconds = time.monotonic() - begin
        _log.info("loaded %d programs in %.1f s", engine.programs.num_compiled, seconds)

    def _compile(self) -> None:
        """Compiles and loads the other programs while the engine runs."""
        try:
            if self._engine.programs.missing:
                self._engine.compile_missing(
                    has_low_priority=True,
                    must_end=lambda: self._is_stopping,
                    report=ProgressLog(),
                    on_done=self._load,
                )
            while not self._is_stopping and self._engine.compile_next():
                self._mail.put(_TIME_IDLE)
        except Exception:
            _log.exception("a program cannot be compiled; rounds use those that are compiled")
        c_library_trim()  # compiling leaves up to a gigabyte of free memory in pieces

    def _load(self, program: Program) -> None:
        """Loads a program that has just come onto disk."""
        self._engine.load(program)
        self._mail.put(_TIME_IDLE)

    def _read(self, order: WeightUpdate, on_done: Callable) -> None:
        """Reads the folders of an update beside the rounds, one update after the other."""
        with self._reading:
            try:
                models = self._read_models(order)
            except Exception as error:
                self._post(on_done, _portable(error))
            else:
                self._mail.put(("update", order, models, on_done))

    def _read_models(self, order: WeightUpdate) -> tuple[Decoder | None, DraftHead | None]:
        """The models of an update, in memory of the host."""
        config, (like, drafter) = self._engine.target_config, self._engine.programs.model_shapes
        own_head = getattr(drafter, "head", None)
        if order.head is not None and own_head is None:
            raise ConfigError.of("head", "the engine drafts without a head: leave it out")
        target = order.folder and loaded(order.folder, like, config)
        return target, order.head and loaded(order.head, own_head, config)

    def _apply_updates(self, on_update: OnUpdate) -> list[tuple[Callable, str | Exception]]:
        """Carries out the orders that need not wait; returns whom to call, each with its answer.

        An order to let requests finish waits for them here, not in the engine, which reads no mail.
        """
        answers = []
        while self._updates:
            order, models, on_done = self._updates[0]
            must_wait = order.running == "finish" and not self._engine.is_paused
            if must_wait and self._engine.begun:
                break
            del self._updates[0]
            answers.append((on_done, self._update(order, models, on_update)))
        self._engine.scheduler.is_draining = bool(self._updates)
        return answers

    def _update(self, order: WeightUpdate, models: tuple, on_update: OnUpdate) -> str | Exception:
        target, head = models
        self._busy_since = self._clock.now()
        try:
            self._engine.update_weights(
                target,
                head=head,
                version=order.version,
                running=order.running,
                donate=True,
                on_update=on_update,
            )
        except (ConfigError, NotReady) as error:
            return _portable(error)
        except RuntimeError as error:
            if self._engine.is_torn:
                torn = "an update of the weights has failed half-way: start the server again"
                raise RuntimeError(torn) from error
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _portable(error)
        finally:
            self._busy_since = None
        return self._engine.version

    def _pause(self, order: Literal["pause", "resume"]) -> str:
        getattr(self._engine, order)()
        return self._engine.version

    def _step(self) -> bool:
        """Reads the mail, then runs a round if there is work. Returns False after `stop`."""
        events: list[Event] = []
        notify = lambda request, tokens: events.append(self._event(request, tokens))
        # Sent after the load, which has the version.
        answers: list[tuple[Callable, str | Exception]] = []
        for item in self._all_mail():
            match item:
                case "submit", jobs:
                    events += self._add(jobs)
                case "abort", key:
                    events += self._end(key)
                case "flush", salt, on_done:
                    self._post(on_done, self._engine.flush_prefix_cache(salt))
                case ("pause" | "resume") as order, on_done:
                    answers.append((on_done, self._pause(order)))
                case "update", order, models, on_done:
                    self._updates.append((order, models, on_done))
                case ("time idle",) if not self._engine.has_work and self._engine.time_idle_round():
                    self._mail.put(_TIME_IDLE)  # one run at a time: requests come first
                case "stop", done:
                    done.set()
                    return False
        answers += self._apply_updates(notify)
        if self._engine.has_work:
            self._busy_since, begin = self._clock.now(), time.monotonic()
            updates = self._engine.step(notify)
            seconds = time.monotonic() - begin
            self._patience = _PATIENCE * seconds
            running = max(self.load.num_running, self._engine.scheduler.num_running)
            self._sequence_seconds += running * seconds
            # A call of several rounds has several updates of a request.
            self._num_vacated = len({id(one) for one, _ in updates if one.is_finished})
            self._rounds += 1
            self._busy_since = None
        num_tokens = sum(len(one.tokens) for one in events if isinstance(one, Tokens))
        self._num_tokens += num_tokens
        self.load = self._measure()
        self._post(self._deliver, events, num_tokens)
        for on_done, value in answers:
            self._post(on_done, value)
        return True

    def _all_mail(self) -> list:
        if self._updates:  # the requests that ended were awaited, and none takes their place
            return self._rest()
        if not self._engine.has_work:
            return [self._mail.get(), *self._rest()]
        mail = self._rest()
        missing = 0 if self._engine.scheduler.num_waiting else self._num_vacated
        until = time.monotonic() + self._patience
        while sum(len(item[1]) for item in mail if item[0] == "submit") < missing:
            try:
                mail.append(self._mail.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
        return mail

    def _rest(self) -> list:
        mail = []
        while not self._mail.empty():
            mail.append(self._mail.get())
        return mail

    def _add(self, jobs: tuple[Job, ...]) -> list[Event]:
        scheduler = self._engine.scheduler
        added: list[Request] = []
        try:
            if len(jobs) > (places := scheduler.num_places):
                waiting = f"{scheduler.num_waiting} requests are waiting"
                raise QueueFull(
                    waiting if len(jobs) == 1 else f"{waiting}, {places} places are left"
                )
            for job in jobs:
                request = self._engine.add_request(
                    job.prompt,
                    job.params,
                    request_id=job.key,
                    salt=job.salt,
                    priority=job.priority,
                    matcher=job.matcher,
                )
                added.append(request)
        except (ConfigError, QueueFull) as error:
            for request in added:
                self._engine.abort(request)
            return [Refused(tuple(job.key for job in jobs), error)]
        for job, request in zip(jobs, added, strict=True):
            self._running[job.key] = request
        return []

    def _end(self, key: Hashable) -> list[Event]:
        request = self._running.pop(key, None)
        if request is None:
            return []
        self._engine.abort(request)
        return [Tokens(key, [], None, Ended.of(request), None, request.num_cached)]

    def _event(self, request: Request, tokens: list[int]) -> Tokens:
        logprobs = None
        if request.logprobs is not None:
            logprobs = request.logprobs[len(request.logprobs) - len(tokens) :]
        end = None
        if request.is_finished:
            del self._running[request.id]
            end = Ended.of(request)
        last_round = request.last_round if tokens else None
        is_first = bool(tokens) and len(tokens) == len(request.output)
        prompt = request.prompt_logprobs if is_first else None
        return Tokens(request.id, tokens, logprobs, end, last_round, request.num_cached, prompt)

    def _measure(self) -> Load:
        scheduler, policy = self._engine.scheduler, self._engine.policy
        total = scheduler.config.total_pages - 1
        return Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=sum(len(request.prompt) for request in scheduler.waiting),
            pages_used=total - scheduler.pool.num_free,
            pages_total=total,
            pages_idle=scheduler.pool.num_idle,
            prefix_queried=scheduler.prefixes.num_queried - self._prefix_before[0],
            prefix_found=scheduler.prefixes.num_found - self._prefix_before[1],
            rings_restored=scheduler.prefixes.saved_rings.num_restored,
            num_preemptions=scheduler.num_preemptions,
            num_not_finite=scheduler.num_not_finite,
            rounds=self._rounds,
            sequence_seconds=self._sequence_seconds,
            acceptance=scheduler.acceptance - self._before,
            num_draft={
                size: scheduler.num_draft_at(size) for size in scheduler.config.batch_buckets
            },
            num_draft_changes=0 if policy is None else policy.num_changes,
            predicted_rate=0.0 if policy is None else policy.rate,
            num_tokens=self._num_tokens,
            version=self._engine.version,
            is_paused=self._engine.is_paused,
        )
