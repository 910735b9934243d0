"""The comparison of methods on a terminal, drawn again in place while they run."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from peagle_jax.cli.runs import METHOD_NAMES, Progress, Run, comparison_table
from peagle_jax.engine.engine import Engine
from peagle_jax.engine.host.request import Request

_PERIOD = 0.2  # seconds between two drawings


class LiveComparison:
    """`runs.comparison_table` of the methods so far. On a stream that is no terminal only `finish`
    writes.

    Args:
      ties: by method, as `comparison_table` takes them; read at each drawing.
      is_on: False draws nothing before `finish`.
      clock: a clock that never goes back, in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        environ: Mapping[str, str],
        ties: dict[str, int] | None,
        *,
        is_on: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream, self._ties, self._clock = stream, ties, clock
        self.is_live = is_on and stream.isatty() and environ.get("TERM") != "dumb"
        self._progress: Progress | None = None
        self._done: list[Run] = []
        self._num_prompts = self._num_lines = 0
        self._drawn = float("-inf")

    def begin(self, engine: Engine, num_prompts: int) -> None:
        """A method begins; its engine compiles first."""
        self._progress, self._num_prompts = Progress(engine), num_prompts
        if self.is_live:
            self._redraw("compiles")

    def update(self, request: Request, tokens: list[int]) -> None:
        """`Engine.generate`'s callback."""
        self._progress.update(request, tokens)
        if self.is_live and self._clock() - self._drawn >= _PERIOD:
            self._redraw(f"{self._progress.num_finished} of {self._num_prompts} prompts")

    def end(self, result: Run) -> None:
        """A method has ended."""
        self._done.append(result)
        self._progress = None

    def finish(self) -> None:
        """Draws the final table."""
        self._draw(comparison_table(self._done, self._ties).splitlines())

    def _redraw(self, state: str) -> None:
        self._drawn = self._clock()
        rows: Sequence[Run | Progress] = self._done
        if self._progress.num_tokens:
            rows = [*rows, self._progress]
        lines = comparison_table(rows, self._ties).splitlines() if rows else []
        # A longer line would take two on the screen, and the next drawing would begin in the wrong
        # one.
        width = shutil.get_terminal_size().columns
        lines.append(f"{METHOD_NAMES[self._progress.method]}: {state}")
        self._draw([line[: width - 1] for line in lines])

    def _draw(self, lines: Sequence[str]) -> None:
        # Moves to the first line of the last drawing and clears the screen below it.
        back = f"\x1b[{self._num_lines}F\x1b[J" if self._num_lines else ""
        self._num_lines = len(lines)
        self._stream.write(back + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
