"""The engine loop: schedule -> dispatch -> commit the previous call. Host code; step.py runs on
device.

add_request -> [waiting] -> schedule() -> Calls
            -> programs.round(state, plan) -> state', output        (round n runs on the device)
            -> commit(output of round n-1) -> tokens to the caller
"""

import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pickle import PicklingError
from typing import TYPE_CHECKING, get_args

import jax

from peagle_jax.checkpoint.incoming import Weights
from peagle_jax.config import (
    FIRST_VERSION,
    AttentionConfig,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    OwnDrafterConfig,
    Running,
    TargetConfig,
)
from peagle_jax.devices import Devices
from peagle_jax.engine.device.compilation import CompileError, Progress, compile_missing
from peagle_jax.engine.device.dispatch import InFlight, dispatch
from peagle_jax.engine.device.memory import summary_of, windows_of
from peagle_jax.engine.device.outputs import Listener, OnUpdate, commit
from peagle_jax.engine.device.program import Call, Program, Round
from peagle_jax.engine.device.programs import Programs
from peagle_jax.engine.device.replacement import drafter_of, replacement
from peagle_jax.engine.device.resolve import resolve_config
from peagle_jax.engine.device.round_timer import RoundTimer
from peagle_jax.engine.device.sizes import check_sizes
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.completion import Completion, completion_of
from peagle_jax.engine.host.k_by_load import LoadPolicy
from peagle_jax.engine.host.pages import Salt
from peagle_jax.engine.host.request import Request
from peagle_jax.engine.host.round_times import RoundTimes
from peagle_jax.engine.host.rules import banned_ids, check_request_of_model
from peagle_jax.engine.host.scheduler import Scheduler, Update
from peagle_jax.errors import NotReady
from peagle_jax.extras import check_installed
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.method.drafter import Drafter
from peagle_jax.method.own_drafters import own_config
from peagle_jax.method.step import AcceptRule
from peagle_jax.method.verify import verify, verify_blocks
from peagle_jax.models import Decoder
from peagle_jax.parallel import replicas
from peagle_jax.parallel.shares import check_shares
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.text.tokenizer import StopChecker, Tokenizer

if TYPE_CHECKING:
    from peagle_jax.engine.structured.grammar import Grammars, Matcher

_log = logging.getLogger(__name__)


def _warn_above(trained: int | None, num_draft: int) -> None:
    """Warns of more drafts than a head was trained for."""
    if trained is not None and num_draft > trained:
        _log.warning(
            "num_speculative_tokens=%d is above the %d this head was trained for; the "
            "later positions will rarely be accepted",
            num_draft,
            trained,
        )


def _drafter_config(
    head: DraftHead | None,
    drafter: Drafter | None,
    target: TargetConfig,
    taps: Sequence[int] | None,
    cache: Sequence[AttentionConfig] | None,
) -> DrafterConfig | OwnDrafterConfig | None:
    """What the engine must know of the drafter; None is plain decoding. Arguments are those of
    `Engine`."""
    if head is None and drafter is not None:
        return own_config(drafter, target, taps, cache)
    if taps is not None or cache is not None:
        raise ConfigError("taps and cache are for a drafter without a head: leave them out")
    return None if head is None else head.config


def _num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class Engine:
    """Continuous batching over one target and at most one drafter.

    Args:
      target: the target model.
      head: the drafter's weights; None means plain decoding (`config.num_draft` becomes 0).
      config: sizes; `max_model_len` is lowered to what the target supports (see
        `sizes.check_sizes`).
      tokenizer: needed for text prompts and stop strings.
      drafter: a drafter to use instead of the one built from `head`; its `num_draft` is replaced by
        that of each call. With a `head` it has the head's taps and cache.
      taps: without a `head`, ids of the target's streams that the drafter gets; None: its own
        `taps`, or none.
      cache: likewise the layers of the drafter's cache; None: its own `cache`, or none.
      accept: the acceptance rule; None: that of `config.verify_method`.
      times: what rounds take, for `config.adaptive`; None: they are measured.
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead | None,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        taps: Sequence[int] | None = None,
        cache: Sequence[AttentionConfig] | None = None,
        accept: AcceptRule | None = None,
        times: RoundTimes | None = None,
    ):
        if config.num_draft == 0:
            head = drafter = taps = cache = None
        check_sizes(target.config, config)
        devices = Devices.of(config)
        for model in (target, head):
            if model is not None:
                check_shares(model.config, devices.count)
        self.target_config = target.config
        self.drafter_config = _drafter_config(head, drafter, target.config, taps, cache)
        if head is None and drafter is not None and devices.count > 1:
            raise ConfigError("a drafter without a head runs on one device, not on several")
        target, head = devices.placed(target), devices.placed(head)
        self._devices, self._drafts_by_head = devices, head is not None and drafter is None
        if self._drafts_by_head:
            drafter = drafter_of(head, target, config, devices)
        self.config = resolve_config(
            self.target_config,
            self.drafter_config,
            config,
            summary_of(devices),
            weights_bytes=_num_bytes((target, drafter if head is None else head)),
        )
        self.tokenizer = tokenizer
        self._trained_length = None if head is None else head.config.trained_length
        eos_ids = self.target_config.eos_ids
        taps = () if self.drafter_config is None else self.drafter_config.taps
        if head is not None:
            taps = taps or self.target_config.default_taps
            _warn_above(head.config.trained_num_draft, config.num_draft)
        if accept is None:
            accept = verify_blocks if config.verify_method == "block" else verify
        self.programs = Programs(
            target, drafter, self.config, taps=taps, accept=accept, devices=devices
        )
        self._timer = None
        self.policy: LoadPolicy | None = None
        """Chooses K with `config.adaptive`; None: K is fixed."""
        if self.config.adaptive != "off":
            self._timer = RoundTimer(self.programs, times)
            self.policy = LoadPolicy(self.config.num_draft, self._timer.times)
        self.scheduler = Scheduler(
            self.config,
            eos_ids=eos_ids,
            windows=windows_of(self.target_config, self.drafter_config),
            policy=self.policy,
        )
        self._state = self.programs.init_state(self.target_config, self.drafter_config)
        self._in_flight: list[InFlight] = []
        self.version = FIRST_VERSION
        """Of the weights; `update_weights` changes it."""
        self._num_updates = 0
        self._has_cache, self._is_paused, self._is_stepping = True, False, False
        self._turn, self._process = threading.RLock(), os.getpid()
        self._is_torn = False
        """Whether an update failed when some weights were replaced."""
        self.numbers = itertools.count()  # of requests; their seeds, where they have none

    def warm_up(
        self,
        on_compiled: Callable[[], None] = lambda: None,
        *,
        sizes: Sequence[int] | None = None,
        only_greedy: bool = False,
    ) -> None:
        """Compiles all programs; afterwards no call compiles. `on_compiled` is called after each
        one.

        With `sizes`, compiles only the round of most drafts of each of these batch buckets; the
        largest bucket must be among them or already compiled. Batches are padded to the next larger
        compiled bucket. `compile_next` compiles the others. With `only_greedy`, rounds of other
        requests are left out: they compile when they come.
        """
        self._compile(self._calls(sizes, only_greedy), on_compiled)
        while sizes is None and self.time_idle_round():
            pass

    def _calls(self, sizes: Sequence[int] | None, only_greedy: bool) -> tuple[Call, ...]:
        """Programs that `warm_up` compiles beside those of every warm-up."""
        if sizes is not None:
            return tuple(Round(RoundShape(size, self.config.num_draft)) for size in sizes)
        programs = self.programs
        rounds = programs.rounds_of_greedy if only_greedy else programs.rounds_of_any
        # Prefills compile longest: begun last, they would be waited for alone.
        return (*programs.small_prefills, *rounds)

    def run_once(self) -> None:
        """Runs each compiled program without a request. Call it before requests come: first calls
        take longer."""
        self._check_ready()
        self._state = self.programs.run_once(self._state)

    def compile_missing(
        self,
        *,
        sizes: Sequence[int] | None = None,
        only_greedy: bool = False,
        has_low_priority: bool = False,
        must_end: Callable[[], bool] = lambda: False,
        report: Callable[[Progress], None] = lambda progress: None,
        on_done: Callable[[Program], None] = lambda program: None,
    ) -> None:
        """Compiles in child processes, onto disk, what `warm_up` compiles: after it a warm-up only
        loads.

        It has no effect where programs are not kept on disk (`EngineConfig.programs_folder`), or
        have no name there.

        Args:
          sizes, only_greedy: as of `warm_up`.
          has_low_priority, must_end, report: as of `compilation.compile_missing`.
          on_done: called with each program that is on disk now, by another thread.

        Raises:
          CompileError: the compiler refuses a program, or dies of it.
        """
        missing = self.missing_on_disk(sizes=sizes, only_greedy=only_greedy)
        if not missing:
            return
        try:
            failed = compile_missing(
                [self.programs.recipe(self.target_config, self.drafter_config)],
                [missing],
                has_low_priority=has_low_priority,
                must_end=must_end,
                report=report,
                on_done=lambda _, program: on_done(program),
            )
        except PicklingError as error:
            _log.info("programs compile in this process: %s", error)
            return
        for (_, program), failure in failed.items():
            if failure.is_final:
                raise CompileError(f"{program} cannot be compiled: {failure.reason}")
            _log.warning("%s compiles in this process: %s", program, failure.reason)

    def compile_next(self) -> bool:
        """Compiles one missing program, while another thread may run the engine.

        Returns:
          Whether one was missing.
        """
        missing = self.programs.missing[:1]
        self._compile(missing)
        return bool(missing)

    def missing_on_disk(self, *, sizes: Sequence[int] | None = None, only_greedy: bool = False):
        """Programs that `compile_missing` would compile; None if programs are not kept on
        disk."""
        programs = self.programs
        some = (*programs.full_prefills, *programs.copies, *self._calls(sizes, only_greedy))
        return programs.not_on_disk(some, self._state)

    def load(self, program: Program) -> None:
        """Compiles a program if it is missing, or reads it from disk; another thread may run the
        engine."""
        self._compile(() if program in self.programs.copies else (program,))

    def _compile(
        self, rounds: Sequence[Call], on_compiled: Callable[[], None] = lambda: None
    ) -> None:
        self.programs.warm_up(self._state, on_compiled, rounds)
        self.scheduler.rounds = self.programs.rounds
        self.scheduler.repeated = self.programs.greedy
        self.scheduler.prefills = self.programs.prefills

    def time_idle_round(self) -> bool:
        """Runs a compiled round over idle slots if its time is not known yet, for
        `config.adaptive`.

        `step` does so too, once per step, so that no request waits for all of them.

        Returns:
          Whether there was one.
        """
        if self._timer is None or self._is_paused or not self._has_cache:
            return False
        if not self._timer.has_idle_run():
            return False
        self._state = self._timer.idle_run(self._state)
        return True

    @property
    def num_programs(self) -> int:
        """Number of programs that `warm_up` compiles."""
        others = 2 + self.config.prompt_logprobs + bool(self.config.saved_rings)
        return others + len(self.programs.rounds_of_any) + len(self.programs.small_prefills)

    @cached_property
    def grammars(self) -> "Grammars | None":
        """Compiles constraints for the model's tokenizer; None without one.

        Raises:
          ConfigError: llguidance is not installed.
        """
        if self.tokenizer is None:
            return None
        check_installed("structured", "a constraint of the output")
        from peagle_jax.engine.structured.grammar import Grammars

        target = self.target_config
        return Grammars(self.tokenizer, target.vocab_size, target.eos_ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: not for requests that wait for `resume` or
        `restore_cache`."""
        if not self._has_cache:
            return False
        return bool(self._in_flight) or (self.scheduler.has_work and not self._is_paused)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called last, not `resume`."""
        return self._is_paused

    @property
    def is_torn(self) -> bool:
        """Whether an update of the weights has failed half-way."""
        return self._is_torn

    @property
    def begun(self) -> list[Request]:
        """Requests that run, or did before a preemption."""
        return [one for one in (*self.scheduler.active, *self.scheduler.waiting) if one.has_begun]

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | int | None = None,
        salt: Salt = (),
        priority: int = 0,
        matcher: "Matcher | None" = None,
    ) -> Request:
        """Queues a request; `step` returns its tokens. Requests with a lower priority come first.

        Args:
          salt: requests with different salts share no cached prefix.
          matcher: `params.structured`, compiled by `grammars` for this request alone; None:
            compiled here.

        Raises:
          ConfigError: as in `validate`.
          QueueFull: no place is left, see `EngineConfig.max_waiting`; retry later.
        """
        tokens, number = self.validate(prompt, params), next(self.numbers)
        num_draft = params.num_speculative_tokens
        if params.structured is not None and matcher is None:
            matcher = self.grammars.compile(params.structured)
        checker = None
        if params.stop:
            shown = self.tokenizer.shown(params, self.target_config.eos_ids)
            checker = StopChecker(self.tokenizer, params.stop, shown)
        request = Request(
            id=number if request_id is None else request_id,
            prompt=tokens,
            params=params,
            num_draft=self.config.num_draft if num_draft is None else num_draft,
            seed=number if params.seed is None else params.seed,
            priority=priority,
            stop_checker=checker,
            salt=salt,
            reads_prefix_cache=params.prompt_logprobs is None,
            matcher=matcher,
            banned_ids=banned_ids(params.bad_words, self.tokenizer),
        )
        request.arrival_time = time.monotonic()
        self.scheduler.add(request)
        if request.num_draft:
            self._warn_of_length(len(tokens) + params.max_tokens)
        return request

    def _warn_of_length(self, length: int) -> None:
        """Warns of the first request that may be longer than the texts of a head's training."""
        trained = self._trained_length
        if trained is not None and length > trained:
            self._trained_length = None
            _log.warning(
                "a request may reach %d tokens, and this head was trained on texts of %d; fewer "
                "drafts are accepted behind them: train it with a longer --length, or set a "
                "smaller max_model_len",
                length,
                trained,
            )

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Validates a request and returns the prompt's token ids. No side effects; thread-safe.

        Raises:
          ConfigError: the request can never run; `field` is "prompt" or a field of
            `SamplingParams`.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError.of("params", "must be SamplingParams")
        if isinstance(prompt, bytes | Mapping):
            raise ConfigError.of("prompt", "must be a text or a list of token ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError.of(
                    "prompt", "text needs a model with a tokenizer; pass token ids"
                )
            # A text of 100 MB takes 20 GB to tokenise.
            limit = self.config.max_model_len
            if len(prompt) > limit * self.tokenizer.longest_token:
                rule = f"{len(prompt)} characters have more than {limit} tokens (max_model_len)"
                raise ConfigError.of("prompt", rule)
            prompt = self.tokenizer.encode(prompt)
        try:
            is_short = len(prompt) < self.config.max_model_len
            ids = [operator.index(token) for token in prompt] if is_short else prompt
        except TypeError:
            raise ConfigError.of("prompt", "must be a text or a list of token ids") from None
        check_request_of_model(ids, params, self.config, self.target_config, self.tokenizer)
        return ids

    def flush_prefix_cache(self, salt: Salt = ()) -> int:
        """Forgets the cached pages that no request holds and whose salt begins with `salt`.

        Returns the number of pages.
        """
        return self.scheduler.pool.flush(salt)

    def abort(self, request: Request) -> None:
        """Ends a request and frees its slot and pages at once. No effect on a finished request."""
        self.scheduler.abort(request)
        request.finish_time = request.finish_time or time.monotonic()

    def step(self, on_update: OnUpdate = lambda request, tokens: None) -> list[Update]:
        """Dispatches the next calls, then commits the previous ones.

        If all requests need the results of the previous calls first, the next calls follow the
        commit.

        Args:
          on_update: called with a request and its new tokens after each round; a call may have
            several. What it raises is raised once all results are committed, in place of the
            updates of this step; until then it is not called again.

        Returns:
          (request, new tokens) for every request in the committed calls; see `request.is_finished`.

        Raises:
          NotReady: the cache is released, an update of the weights has failed half-way, or this
            process is a fork of the engine's.
        """
        self._check_ready()
        self._is_stepping = True
        try:
            return self._step(on_update)
        finally:
            self._is_stepping = False

    def _step(self, on_update: OnUpdate) -> list[Update]:
        if not self.time_idle_round() and not self._in_flight and self._timer is not None:
            self._timer.interrupt()
        previous = len(self._in_flight)
        self._dispatch()
        updates, listener = [], Listener(on_update)
        try:
            for _ in range(previous):
                updates += self._commit(listener)
            if previous and not self._in_flight:
                # All requests waited for this result, as constrained ones do. Without this call the
                # device would stand idle while the caller reads the updates.
                if self._timer is not None:
                    self._timer.interrupt()
                self._dispatch()
        finally:
            listener.reraise()
        return updates

    def _dispatch(self) -> None:
        """Plans the next calls and dispatches them, unless the engine is paused."""
        if self._is_paused:
            return
        try:
            calls, repeat = self.scheduler.schedule(), self.config.repeat
            dispatched = dispatch(self.programs, self._state, calls, repeat, self.version)
            for self._state, call in dispatched:
                self._in_flight += [] if call is None else [call]
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Aborts requests that count on calls which may be lost, and forgets cached pages, which
        may lack their contents."""
        waiting = [request for request in self.scheduler.waiting if request.in_flight]
        for request in [*self.scheduler.active, *waiting]:
            self.abort(request)
        self.flush_prefix_cache()

    def _commit(self, on_update: OnUpdate) -> list[Update]:
        """Commits the oldest call in flight. An interrupt while its result is awaited loses
        nothing."""
        call, result, version = self._in_flight[0]
        output = result.fetch()
        del self._in_flight[0]
        try:
            if output.replicas is not None:
                replicas.check(output.replicas)
            if self._timer is not None:
                self._timer.fetched(call)
            return commit(self.scheduler, call, output, on_update, version)
        except BaseException:
            self._give_up()
            raise

    def update_weights(
        self,
        weights: Weights | None = None,
        *,
        head: Weights | None = None,
        version: str | None = None,
        running: Running = "keep",
        donate: bool = False,
        on_update: OnUpdate = lambda request, tokens: None,
    ) -> list[Update]:
        """Replaces the weights; nothing compiles. All is checked before anything changes.

        Cached prefixes are forgotten, and K is chosen anew. It waits for a thread that reads the
        weights to compile a program.

        Args:
          weights: the target's: a module or a pytree of its parameters, with the engine's names,
            shapes and dtypes, or unquantised for FP8 weights; a folder; or an iterable of (Hugging
            Face name, array). The last two are cast and quantised as in loading. An adapter
            that was merged at load is not merged again. None: they stay.
          head: likewise those of the head.
          version: name of the weights; None: the number of updates of the target so far.
          running: what becomes of requests that run. "keep": their next tokens are those of the new
            weights, with which their keys and values are computed again. "finish": they run to
            their end first, and none is admitted meanwhile. "abort": they end with the reason
            "abort". Requests in the queue wait in each case.
          donate: take device arrays over, so that the caller's are deleted, but for those that come
            under several names; else copy them. Either way one array after the other is replaced.
          on_update: as of `step`, for the requests that finish or are aborted.

        Returns:
          Updates, as of `step`, of the requests that finish or are aborted.

        Raises:
          ConfigError: one line for each leaf that differs in name, shape or dtype, or has numbers
            that are not finite. The engine is as before.
          NotReady: it is called within a step, or requests are to finish while the engine is paused
            or has no cache.
        """
        if running not in get_args(Running):
            raise ConfigError.of(
                "running", f"{running!r} is none of {', '.join(get_args(Running))}"
            )
        if head is not None and not self._drafts_by_head:
            raise ConfigError.of("head", "the engine drafts without a head: leave it out")
        if version is not None and not (isinstance(version, str) and version):
            raise ConfigError.of("version", f"{version!r} is no text: a name, or None")
        self._check_between_steps()
        models = replacement(
            self.programs,
            self._devices,
            self.config,
            weights,
            head,
            donate=donate,
            makes_drafter=self._drafts_by_head,
        )
        ended = self._end_running(running, on_update)
        self.scheduler.start_over()
        if self.policy is not None:
            self.policy.start_over()
        self._is_torn = True
        models.take_over(self.programs)
        self._is_torn = False
        self._num_updates += weights is not None
        if version is not None or weights is not None:
            self.version = str(self._num_updates) if version is None else version
        return ended

    def _end_running(self, running: Running, on_update: OnUpdate) -> list[Update]:
        """Lets the requests that run finish, or aborts them; returns their updates."""
        updates: list[Update] = []
        if running == "abort":
            updates = [(request, []) for request in self.begun]
            for request, _ in updates:
                self.abort(request)
            for update in updates:
                on_update(*update)
        elif running == "finish" and self.begun:
            if self._is_paused:
                raise NotReady("requests cannot finish in an engine that is paused")
            self.scheduler.is_draining = True
            try:
                while self.begun:
                    updates += self.step(on_update)
            finally:
                self.scheduler.is_draining = False
        return updates

    def pause(self) -> None:
        """Stops after the calls in flight, which `step` commits. Requests keep their places, and
        new ones wait. No effect on a paused engine."""
        self._is_paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._is_paused = False

    def release_cache(self) -> None:
        """Frees the device memory of all keys and values and of the slots; programs and weights
        stay. Requests that run are preempted: `restore_cache` lets them go on, as if they had not
        been, and cached prefixes are forgotten.

        Raises:
          NotReady: the cache is released already, or this is called within a step.
        """
        self._check_between_steps()
        if not self._has_cache:
            raise NotReady("the cache is released already: call restore_cache first")
        self.scheduler.start_over()
        self._has_cache = False
        self._state = self.programs.released(self._state)

    def restore_cache(self) -> None:
        """Allocates again what `release_cache` freed. If memory is too small, the cache stays
        released.

        Raises:
          NotReady: the cache is there.
        """
        self._check_process()
        if self._has_cache:
            raise NotReady("the cache is not released")
        links = self._state.links
        self._state = self.programs.init_state(self.target_config, self.drafter_config, links)
        self._has_cache = True

    def _check_ready(self) -> None:
        """Raises `NotReady` if no program can run."""
        self._check_process()
        if not self._has_cache:
            raise NotReady("the cache is released: call restore_cache first")
        if self._is_torn:
            raise NotReady("an update of the weights has failed half-way: update them again")

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # jax's threads stayed there: a call would never end
            raise NotReady(
                "an engine does not survive a fork: load it in this process, or start processes "
                "by multiprocessing's 'spawn'"
            )

    def _check_between_steps(self) -> None:
        self._check_process()
        if self._is_stepping:
            raise NotReady("this cannot be called within a step, as by on_update")

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_update: OnUpdate = lambda request, tokens: None,
    ) -> list[Completion]:
        """Runs all prompts to completion and returns the completions in prompt order. Of several
        threads each waits for its turn.

        Args:
          prompts: texts, or lists of token ids; one text is no list.
          params: one for all prompts, or one per prompt.
          on_update: called with a request and its new tokens, for streaming and progress bars. The
            request's `id` is the index of its prompt.
        """
        if isinstance(prompts, str | bytes | Mapping):
            raise ConfigError.of("prompts", "must be a list, for one text [text]")
        prompts = list(prompts)
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            rule = f"{len(params)} for {len(prompts)} prompts; give one for all, or one for each"
            raise ConfigError.of("params", rule)
        self._check_process()
        with self._turn:
            return self._generate(prompts, params, on_update)

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        on_update: OnUpdate,
    ) -> list[Completion]:
        todo = iter(zip(prompts, params, strict=True))
        requests: list[Request] = []
        try:
            while True:
                if self._is_paused:
                    raise NotReady("the engine is paused: call resume first")
                self._check_ready()
                room = self.scheduler.num_places
                for item in itertools.islice(todo, room):
                    requests.append(self.add_request(*item, request_id=len(requests)))
                if not self.has_work:
                    break
                self.step(on_update)
        except BaseException:
            # After an invalid prompt or an interrupt no request of this call may stay in the
            # engine.
            for request in requests:
                self.abort(request)
            # An interrupt may come between plan and dispatch: then known pages have no contents.
            self.flush_prefix_cache()
            raise
        eos_ids = self.target_config.eos_ids
        return [completion_of(request, self.tokenizer, eos_ids) for request in requests]
