"""`python -m lab batch`: commands of peagle-bench from a file, until the time is over.

A blank line between two commands begins a new process. Commands of one process over one preset
share its weights. A process that fails or hangs does not stop those after it: its rows so far are
kept.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.__main__ import PROGRAM
from bench.command import Command, Options, RowFileOptions, option
from lab.cell_programs import Work, compile_all, work_of
from peagle_jax.config import ConfigError

_LIMIT = "# at most "
_EARLY = "# while the others compile"
_VARIABLE = "# environment "
_END_SECONDS = 10.0
"""For a process to end by itself after SIGINT; one that waits for a device does not."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RowFileOptions):
    """Options of this command.

    Args:
      file: file with commands of peagle-bench, one a line; a blank line begins a new process
      jobs: processes that compile all programs onto disk before the first part; each takes 2 to 4
        GB of memory of the host
      seconds: end of the last command, counted from the start of the first
      least_seconds: a process that would have less time is left out
    """

    file: Path = option(positional=True)
    jobs: int = 1
    seconds: int | None = None
    least_seconds: int = 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """Commands of one process.

    Attributes:
      lines: their arguments.
      seconds: after which the process is ended; None: no limit but that of all.
      is_early: whether it begins as soon as its own programs are compiled. Its times are disturbed
        by those that compile meanwhile.
      environment: variables of the process besides those of this one.
    """

    lines: tuple[tuple[str, ...], ...]
    seconds: float | None = None
    is_early: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def parts_of(text: str) -> list[Part]:
    """The parts of a file, with the comments that belong to a part; others are left out.

    Raises:
      ConfigError: a limit is no number, or a variable has no value.
    """
    parts = []
    for block in text.replace("\\\n", " ").split("\n\n"):
        lines, variables, seconds, is_early = [], [], None, False
        for line in map(str.strip, block.splitlines()):
            if line.startswith(_LIMIT):
                try:
                    seconds = float(line.removeprefix(_LIMIT).split()[0])
                except (ValueError, IndexError) as error:
                    raise ConfigError(
                        f"{line!r}: give the seconds, as in '# at most 60 s'"
                    ) from error
            elif line == _EARLY:
                is_early = True
            elif line.startswith(_VARIABLE):
                name, equals, value = line.removeprefix(_VARIABLE).partition("=")
                if not (name.isidentifier() and equals):
                    raise ConfigError(
                        f"{line!r}: give a variable, as in '# environment NAME=VALUE'"
                    )
                variables.append((name, value))
            elif line and not line.startswith("#"):
                lines.append(tuple(shlex.split(line)))
        if lines:
            parts.append(
                Part(
                    lines=tuple(lines),
                    seconds=seconds,
                    is_early=is_early,
                    environment=tuple(variables),
                )
            )
    return parts


def run(options: BatchOptions) -> int:
    """Runs all parts. Returns the exit code: 1 if a part failed, was ended or was left out.

    Raises:
      ConfigError: the file cannot be read, or a command in it is wrong; then nothing runs.
    """
    start = time.monotonic()
    try:
        text = options.file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.file}: cannot be read ({error.strerror})") from error
    parts = [
        replace(one, lines=tuple(_with_file(line, options) for line in one.lines))
        for one in parts_of(text)
    ]
    work = [[one for line in part.lines for one in work_of(_parsed(line))] for part in parts]
    left = lambda: (
        float("inf") if options.seconds is None else options.seconds + start - time.monotonic()
    )
    compiling = _Compiling(work, options)
    compiling.start()
    codes = []
    for number, part in enumerate(parts, 1):
        title = f"part {number} of {len(parts)}"
        compiling.wait(number - 1, is_early=part.is_early)
        if left() < options.least_seconds:
            _say(f"{title} is left out: {left():.0f} s are left")
            codes.append(1)
            continue
        began = time.monotonic()
        limit = min(left(), float("inf") if part.seconds is None else part.seconds)
        for line in part.lines:
            _say(f"{title}: {shlex.join(line)}")
        codes.append(_run(part, limit, os.environ | dict(part.environment)))
        _say(f"{title} ended with exit code {codes[-1]} after {time.monotonic() - began:.0f} s")
    return int(any(codes))


def _with_file(line: tuple[str, ...], options: BatchOptions) -> tuple[str, ...]:
    """The arguments with the file for rows, and the commit."""
    sha = ("--sha", options.commit) if options.commit else ()
    place = line.index("--") if "--" in line else len(line)  # options of a server stand behind it
    return (*line[:place], "--out", str(options.out), *sha, *line[place:])


def _parsed(line: tuple[str, ...]) -> Options:
    _, options = PROGRAM.parse(line)
    options.check()
    return options


class _Compiling:
    """Compiles the programs of all parts, in a thread.

    Args:
      work: engines of each part.
    """

    def __init__(self, work: Sequence[Sequence[Work]], options: BatchOptions):
        self._left = [len(some) for some in work]
        self._owners = [part for part, some in enumerate(work) for _ in some]
        self._changed = threading.Condition()
        self._is_over = options.jobs == 1
        self._compile = partial(
            compile_all,
            [one for some in work for one in some],
            options.jobs,
            _say,
            seconds=None if options.seconds is None else options.seconds / 2,
            on_ready=self._ready,
        )

    def start(self) -> None:
        if not self._is_over:
            threading.Thread(target=self._run, daemon=True).start()

    def wait(self, part: int, *, is_early: bool) -> None:
        """Returns once nothing compiles any more, or for an early part once its own programs are
        compiled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (is_early and not self._left[part]))

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:  # the parts compile for themselves
            _say(f"nothing more compiles beforehand: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _ready(self, index: int) -> None:
        with self._changed:
            self._left[self._owners[index]] -= 1
            self._changed.notify_all()


def _run(part: Part, seconds: float, environment: Mapping[str, str]) -> int:
    """Runs a part in a process of its own, for at most `seconds`. Returns its exit code."""
    command = [sys.executable, "-m", "lab.batch", *map(shlex.join, part.lines)]
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        return process.wait(None if seconds == float("inf") else seconds)
    except subprocess.TimeoutExpired:
        _say(f"the part has run for {seconds:.0f} s and is ended")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        return 124
    finally:  # also if this process is interrupted
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its replicas hold devices
        process.wait()


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(lines: Sequence[str]) -> int:
    """Runs the commands of one part in this process. Returns the largest exit code."""
    codes = []
    for line in lines:
        arguments = shlex.split(line)
        sys.argv[:] = [PROGRAM.name, *arguments]  # rows say by which command they were measured
        codes.append(PROGRAM.main(arguments))
    return max(codes)


COMMAND = Command(
    examples=("batch lab/data/two_gpus.txt --jobs 24 --seconds 540 --out rows.jsonl",),
    description="""
Runs the commands of a file, without "peagle-bench" in front, and gives each of them --out and
--sha. Rows are written as they come. A blank line begins a new process; commands of one process
over one preset share its weights. The comment "# at most N s" above a command ends its process
after N seconds; "# while the others compile" begins it as soon as its own programs are compiled,
for commands whose times do not matter; "# environment NAME=VALUE" sets a variable of the
environment of its process. A process that fails or is ended does not stop the next one. With --jobs
all programs of decode-step and of lossless --preset compile side by side first, in the order of the
file; the processes load them from the cache folder. Exit code 1 if a process failed, was ended or
was left out.
""",
    options=BatchOptions,
    run=run,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
