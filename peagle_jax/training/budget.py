"""The length of a training run: a number of steps, or minutes."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from peagle_jax.training.curves import write_whole

COMPILING_STEPS = 2
_STEPS_BETWEEN_LOOKS = 20


class Budget:
    """`total` is the number of steps of a run; None as long as it is not known.

    A run of `minutes` fixes it once, when the cool-down has to begin: until then the learning rate
    does not depend on it. So the pace is that of most of the run, with checkpoints, evaluations,
    and the work of other processes on the device. The number is stored under `out` for runs that
    are continued, as that of `cool_down`.

    Args:
      decay: share of the run in which the learning rate cools down.
      clock: seconds.
    """

    def __init__(
        self,
        out: Path,
        steps: int | None,
        minutes: float | None,
        decay: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = steps
        self.path = out / "total_steps.json"
        self.minutes, self.decay, self.clock = minutes, decay, clock
        self.started = clock()
        self.measured = -COMPILING_STEPS  # steps since `mark`
        self.steps = steps
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            if stored.get("steps") == steps:  # else another length is asked for now
                self.total = stored["total_steps"]

    def measure(self, step: int, wait: Callable[[], object]) -> None:
        """Call after every step. `wait` returns when the steps so far have run."""
        if self.total is not None:
            return
        self.measured += 1
        if self.measured < 0 or self.measured % _STEPS_BETWEEN_LOOKS:
            return
        wait()
        now = self.clock()
        if self.measured == 0:
            self.mark = now
            return
        pace = (now - self.mark) / self.measured
        left = self.started + 60 * self.minutes - now
        if left - _STEPS_BETWEEN_LOOKS * pace <= self.decay * 60 * self.minutes:
            self._fix(step + max(1, int(left / pace)))

    def cool_down(self, step: int) -> bool:
        """Lets the cool-down begin at `step`, in its share of the steps so far; returns whether it
        had not begun."""
        total = max(step + 1, math.ceil(step / (1 - self.decay)))
        begins = self.total is None or total < self.total
        if begins:
            self._fix(total)
        return begins

    def _fix(self, total: int) -> None:
        self.total = total
        asked = {} if self.steps is None else dict(steps=self.steps)
        write_whole(self.path, json.dumps(dict(total_steps=total) | asked) + "\n")
