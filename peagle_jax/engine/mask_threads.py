"""Threads that compute the masks of a round. Host code, no jax here."""

import math
import os
import time

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

_SECONDS_A_THREAD = 0.001
"""Seconds of work for each thread. Waking a thread for less takes longer than it saves."""
_SAMPLED_EVERY = 8
"""One in this many calls with several threads measures the masks of one request."""
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

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

    def fill(self, windows: list[Window], masks: np.ndarray) -> float:
        """Fills the rows of `windows` in `masks` [n, words] int32.

        Returns:
          Seconds of the masks of one request: on average, or with several threads an upper bound.
        """
        count, begin = self.count(len(windows)), time.perf_counter()
        if count > 1:
            self._num_parallel += 1
            turn, rest = divmod(self._num_parallel, _SAMPLED_EVERY)
            if (
                rest == 0
            ):  # the time of a call on several threads does not give the time of one request
                place = turn % len(windows)
                self._measure(windows[place], masks)
                windows = windows[:place] + windows[place + 1 :]
        fill_next_token_bitmask_par_with_draft_tokens(self.pool(count), windows, masks)
        seconds = time.perf_counter() - begin
        if count == 1:
            seconds = self.seconds_each = seconds / len(windows)
        return seconds

    def _measure(self, window: Window, masks: np.ndarray) -> None:
        """Fills the rows of one request in this thread, and changes the estimate by its processor
        time."""
        begin = time.thread_time()
        # llguidance computes a single window in the thread of its caller.
        fill_next_token_bitmask_par_with_draft_tokens(self.pool(1), [window], masks)
        self.seconds_each += (time.thread_time() - begin - self.seconds_each) / 4
