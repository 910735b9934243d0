"""Commits the outputs of device calls, and tells the caller, whose exceptions must not interrupt a
commit."""

import logging
import time
from collections.abc import Callable, Iterable

from peagle_jax.engine.host.calls import DecodeCall, PrefillCall
from peagle_jax.engine.host.prompt_logprobs import store_prompt_logprobs
from peagle_jax.engine.host.request import BatchLogprobs, Request
from peagle_jax.engine.host.scheduler import Scheduler, Update
from peagle_jax.method.step import StepOutput

OnUpdate = Callable[[Request, list[int]], object]
"""Called with a request and its new tokens."""


_log = logging.getLogger(__name__)


def commit(
    scheduler: Scheduler,
    call: PrefillCall | DecodeCall,
    output: StepOutput,
    on_update: OnUpdate,
    version: str,
) -> list[Update]:
    """Commits the output of a call, and calls `on_update` with each of its updates; `version` is
    that of the weights of the call."""
    now, updates = time.monotonic(), []
    for request, tokens in _committed(scheduler, call, output):
        updates.append((request, tokens))
        if tokens:
            request.first_token_time = request.first_token_time or now
            if not request.versions or request.versions[-1][1] != version:
                request.versions.append((len(request.output) - len(tokens), version))
        if request.is_finished:
            request.finish_time = now
        if request.error is not None:
            at = len(request.output)
            _log.error("request %s failed at output token %d: %s", request.id, at, request.error)
        on_update(request, tokens)
    return updates


def _committed(
    scheduler: Scheduler, call: PrefillCall | DecodeCall, output: StepOutput
) -> Iterable[Update]:
    """The updates of a call, whose requests change as they are read."""
    tokens, count = output.packed[..., :-1], output.packed[..., -1]
    if isinstance(call, DecodeCall) and call.repeat > 1:
        return scheduler.commit_rounds(call, tokens, count, output.drafts)
    logprobs = None
    if any(r is not None and r.params.logprobs is not None for r in call.requests):
        logprobs = BatchLogprobs(output.logprobs, output.top_ids, output.top_logprobs)
    if output.prompt is not None:
        store_prompt_logprobs(call, output.prompt)
    is_prefill = isinstance(call, PrefillCall)
    commit_call = scheduler.commit_prefill if is_prefill else scheduler.commit_decode
    return commit_call(call, tokens, count, output.drafts, logprobs)


class Listener:
    """Calls `on_update` until it raises once, and keeps that exception until all results are
    committed.

    The rest of a call, and the calls behind it, would otherwise be lost.
    """

    def __init__(self, on_update: OnUpdate):
        self._on_update = on_update
        self._error: BaseException | None = None

    def __call__(self, request: Request, tokens: list[int]) -> None:
        if self._error is not None:
            return
        try:
            self._on_update(request, tokens)
        except BaseException as error:
            self._error = error

    def reraise(self) -> None:
        """Raises the exception, if there was one."""
        if self._error is not None:
            raise self._error
