"""Threads that compute the masks of a round. Host code, no jax here."""

import math
import time
from collections.abc import Sequence

import llguidance
import numpy as np
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from peagle_jax.cores import num_cores

_SECONDS_A_THREAD = 0.001
"""Seconds of work for each thread. Waking a thread for less takes longer than it saves."""
_SAMPLED_EVERY = 8
"""One in this many calls with several threads measures the masks of one request."""
_LONG = 0.01
"""Seconds of a call after which each request is measured: one of them may have become costly."""
_NUM_CORES = num_cores()

Window = tuple[llguidance.LLMatcher, int, list[int]]
"""A matcher, the row of its first mask, and the drafts of the next masks."""


class MaskThreads:
    """Chooses the number of threads for the masks of each call: one for each millisecond of work.

    Args:
      most: number of threads for costly masks; None: one for each core.
    """

    def __init__(self, most: int | None = None):
        self.most = _NUM_CORES if most is None else most
        self.seconds_each = 0.0
        """Estimated time of the masks of one request in a call, on one thread."""
        self._pools: dict[int, llguidance.LLExecutor] = {}
        self._num_parallel = 0  # calls that took several threads
        self._num_calls, self._measures_at = 0, 0  # the call that measures each request

    def pool(self, count: int) -> llguidance.LLExecutor:
        """A pool of `count` threads."""
        if count not in self._pools:
            self._pools[count] = llguidance.LLExecutor(count)
        return self._pools[count]

    def count(self, num_requests: int) -> int:
        """Number of threads for the masks of these requests: a power of two, or `most`; one thread
        for one request."""
        if num_requests == 1:
            return 1
        wanted = max(1.0, num_requests * self.seconds_each / _SECONDS_A_THREAD)
        return min(1 << math.ceil(math.log2(wanted)), self.most)

    def fill(
        self, windows: list[Window], masks: np.ndarray, unknown: Sequence[int] = ()
    ) -> dict[int, float]:
        """Fills the rows of `windows` in `masks` [n, words] int32.

        Args:
          unknown: places in `windows` of requests that have not been measured.

        Returns:
          Processor time in seconds of the windows that were measured, by their place.
        """
        self._num_calls += 1
        count, begin = self.count(len(windows)), time.perf_counter()
        alone = {*unknown}
        if self._num_calls == self._measures_at:
            alone = {*range(len(windows))}
        elif count > 1:
            self._num_parallel += 1
            turn, rest = divmod(self._num_parallel, _SAMPLED_EVERY)
            if rest == 0:  # the time of a call on several threads does not give that of one request
                alone.add(turn % len(windows))
        seconds = {place: self._measure(windows[place], masks) for place in sorted(alone)}
        others = [window for place, window in enumerate(windows) if place not in alone]
        if others:
            self._fill(count, others, masks)
        elapsed = time.perf_counter() - begin
        if count == 1:
            self.seconds_each = elapsed / len(windows)
        else:
            for one in seconds.values():
                self.seconds_each += (one - self.seconds_each) / 4
        if elapsed > _LONG and self._num_calls >= self._measures_at + _SAMPLED_EVERY:
            self._measures_at = self._num_calls + 1
        return seconds

    def _measure(self, window: Window, masks: np.ndarray) -> float:
        """Fills the rows of one request in this thread; returns the processor time."""
        begin = time.thread_time()
        # llguidance computes a single window in the thread of its caller.
        self._fill(1, [window], masks)
        return time.thread_time() - begin

    def _fill(self, count: int, windows: list[Window], masks: np.ndarray) -> None:
        drafted = [window for window in windows if window[2]]
        plain = [window[:2] for window in windows if not window[2]]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self.pool(count), drafted, masks)
        if plain:  # the other function takes no window without drafts
            fill_next_token_bitmask_par(self.pool(count), plain, masks)
