"""Dispatches the device calls of one engine step, in their order."""

import time
from collections.abc import Iterator

from peagle_jax.engine.device.programs import Programs
from peagle_jax.engine.device.transfer import Result
from peagle_jax.engine.host.calls import Calls, DecodeCall, PrefillCall
from peagle_jax.method import step

InFlight = tuple[PrefillCall | DecodeCall, Result, str]
"""A dispatched call, its result, and the version of its weights."""


def dispatch(
    programs: Programs, state: step.State, calls: Calls, repeat: int, version: str
) -> Iterator[tuple[step.State, InFlight | None]]:
    """Dispatches the round, then the prefill calls with their controls and copies of rings.

    Args:
      state: consumed.
      repeat: rounds in a call of a program for greedy requests.
    Yields:
      After each device call the next state, so that an interrupt cannot lose it, and the call if it
      has a result.
    """
    if calls.decode is not None:
        decode = calls.decode
        # A greedy program that was compiled after this call was planned may run more rounds than
        # it.
        is_greedy = decode.is_greedy and decode.repeat == repeat
        state, result = programs.round(state, decode.plan, decode.shape, decode.mask, is_greedy)
        yield state, (decode, result, version)
    for prefill in calls.prefills:
        now = time.monotonic()
        for request in filter(None, prefill.requests):
            request.start_time = request.start_time or now
        for controls in prefill.controls:
            yield (state := programs.control(state, controls)), None
        for copy in prefill.restores:
            yield (state := programs.copy_rings(state, *copy)), None
        state, result = programs.prefill(state, prefill.plan, prefill.mask, prefill.scores)
        yield state, (prefill, result, version)
        for copy in prefill.saves:
            yield (state := programs.copy_rings(state, *copy)), None
