"""Runs an engine at a fixed concurrency and times its rounds."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle_jax.config import ConfigError
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.request import Request, RequestState
from peagle_jax.engine.host.stats import Acceptance
from peagle_jax.sampling_params import SamplingParams

SETTLED = 3  # rounds with the same full batch before one is timed: two are in flight


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One engine at one concurrency. Times are in milliseconds, except `seconds`, the wall time of
    the run.

    `ms_per_round` is the median over rounds in which every slot decodes and no request prefills or
    ends; the rounds of one call have equal times. If a run has no such round, it is the decoding
    time of all requests divided by their rounds. `ms_per_round_mean` is the mean over the same
    rounds, and `full_tokens_per_second` counts the tokens of these rounds alone; None if there are
    none.
    """

    requests: list[Request]
    seconds: float
    ms_per_round: float
    ms_per_round_mean: float
    timed_rounds: int
    full_tokens_per_second: float | None = None

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output for request in self.requests]

    def as_row(self) -> dict:
        tokens = sum(len(output) for output in self.outputs)
        first = [1e3 * (r.first_token_time - r.arrival_time) for r in self.requests]
        return {
            "prompts": len(self.requests),
            "prompt_tokens": sum(len(r.prompt) for r in self.requests),
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "ms_per_round": self.ms_per_round,
            "ms_per_round_mean": self.ms_per_round_mean,
            "timed_rounds": self.timed_rounds,
            "full_tokens_per_second": self.full_tokens_per_second,
            "ttft_ms_median": statistics.median(first),
            "ttft_ms_max": max(first),
            **Acceptance.of(self.requests).as_row(),
        }


def is_full(engine: Engine, concurrency: int) -> bool:
    """Whether `concurrency` requests decode and no request prefills."""
    active = engine.scheduler.active
    return len(active) == concurrency and all(r.state is RequestState.RUNNING for r in active)


def drive(
    engine: Engine,
    prompts: Sequence[str | list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int,
    on_finished: Callable[[], object] = lambda: None,
    starts: Sequence[float] | None = None,
) -> Measurement:
    """Keeps `concurrency` requests in a warm engine until all prompts are done.

    With `starts`, in ascending seconds after the beginning, no prompt is given to the engine before
    its start.

    `params` are those of all prompts, or of each one.

    Raises:
      ConfigError: the model's logits are not finite, so there is nothing to measure.
    """
    given = itertools.repeat(params) if isinstance(params, SamplingParams) else params
    todo = deque(zip(prompts, given, starts or itertools.repeat(0.0), strict=False))
    requests: list[Request] = []
    running, settled, timed, full_tokens = 0, 0, [], 0
    start = time.perf_counter()
    while todo or engine.has_work:
        while running < concurrency and todo and todo[0][2] <= time.perf_counter() - start:
            prompt, its_params, _ = todo.popleft()
            requests.append(engine.add_request(prompt, its_params))
            running += 1
        if not engine.has_work:
            time.sleep(max(0.0, start + todo[0][2] - time.perf_counter()))
            continue
        settled = settled + 1 if is_full(engine, concurrency) else 0
        before = time.perf_counter()
        updates = engine.step()
        spent = time.perf_counter() - before
        # A call of several rounds has several updates of a request.
        finished = {id(request) for request, _ in updates if request.is_finished}
        # The last call of a text has rounds that emit nothing.
        if settled >= SETTLED and updates and not finished:
            count = max(1, len(updates) // concurrency)
            timed += [spent / count] * count
            full_tokens += sum(len(tokens) for _, tokens in updates)
        for request, _ in updates:
            if request.error is not None:
                raise ConfigError(f"prompt {requests.index(request) + 1}: {request.error}")
        for _ in finished:
            running -= 1
            on_finished()
    seconds = time.perf_counter() - start
    timed_rounds = len(timed)
    full_speed = full_tokens / sum(timed) if timed else None
    if not timed:
        decoding = sum(r.finish_time - r.first_token_time for r in requests)
        timed = [decoding / max(1, sum(r.rounds for r in requests))]
    return Measurement(
        requests=requests,
        seconds=seconds,
        ms_per_round=1e3 * statistics.median(timed),
        ms_per_round_mean=1e3 * statistics.fmean(timed),
        timed_rounds=timed_rounds,
        full_tokens_per_second=full_speed,
    )
