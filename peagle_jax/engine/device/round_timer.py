"""Measures rounds on the host: compiled ones over idle slots, and those that serve requests."""

import time
from collections import Counter

from peagle_jax.engine.device.programs import Programs
from peagle_jax.engine.host.calls import DecodeCall, PrefillCall, RoundShape
from peagle_jax.engine.host.round_times import RoundTimes
from peagle_jax.method import step


class RoundTimer:
    """Fills `times` while an engine runs. It never waits for the device on behalf of a real round.

    The time of a real round is the time between its result and the one before it. That holds while
    the device has the next call before it ends the last: not after a pause, and not if a prefill
    call ran between the two.

    Args:
      programs: of the engine.
      times: given times, which are neither measured over idle slots nor stored; None: stored ones.
    """

    def __init__(self, programs: Programs, times: RoundTimes | None):
        self._programs = programs
        self._is_stored = times is None
        self.times = RoundTimes(programs.stored_times.load()) if times is None else times
        self._num_seen = 0  # programs whose missing times are in `_untimed`
        self._untimed: list[RoundShape] = []
        self._last_result: float | None = None  # of a round that the next call followed at once

    def has_idle_run(self) -> bool:
        """Whether a batch bucket with a choice, all of it compiled, has a round without a time."""
        if self._num_seen != self._programs.num_ready:
            self._num_seen = self._programs.num_ready
            compiled = self._programs.compiled
            choices = Counter(shape.size for shape in compiled)
            incomplete = self._programs.sizes_missing
            self._untimed = self.times.untimed(
                shape
                for shape in compiled
                if choices[shape.size] > 1 and shape.size not in incomplete
            )
        return bool(self._untimed)

    def idle_run(self, state: step.State) -> step.State:
        """Times one run over idle slots; `state` is consumed. Returns the next state."""
        shape = self._untimed[0]
        state, seconds = self._programs.time_idle(state, shape)
        self.times.add_idle_run(shape, seconds)
        self._untimed = self.times.untimed(self._untimed)
        if self._is_stored and not self._untimed:
            self._programs.stored_times.save(self.times.idle)
        self.interrupt()
        return state

    def fetched(self, call: PrefillCall | DecodeCall) -> None:
        """The result of `call` has just arrived."""
        if isinstance(call, PrefillCall):
            self.interrupt()
            return
        now = time.perf_counter()
        if self._last_result is not None:
            self.times.add_round(call.shape, (now - self._last_result) / call.repeat)
        self._last_result = now

    def interrupt(self) -> None:
        """The next result does not follow the last one at once."""
        self._last_result = None
