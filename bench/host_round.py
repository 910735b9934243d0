"""Times of the host's work for a round of the embedded model: `python -m bench.host_round`.

A small model is bound by the host: the device waits while the next call is planned, packed and launched.
Parts are timed with a clock around the engine's own functions, in a run of their own, since the
clock costs a few microseconds itself.
"""

import argparse
import itertools
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import rows
from bench.cells import CellsConfig
from bench.command import (
    METHODS,
    Options,
    add_options,
    list_of_positive,
    option,
    positive,
    rounds_per_call_option,
)
from bench.kernel_times import profile_rounds
from bench.sweep import prompt_set
from bench.timing import SETTLED, is_full
from peagle_jax.cli import runs
from peagle_jax.engine.device import programs, transfer
from peagle_jax.engine.engine import Engine
from peagle_jax.sampling_params import SamplingParams

_BATCHES = 8
"""Batches of requests in a run, one after the other."""

_TRACED = 4
"""Calls in a trace."""

_TRACED_TOKENS = 512
"""Most tokens of its texts, so that none ends within the trace."""


@dataclass(frozen=True, kw_only=True)
class HostOptions(Options):
    """The cells to measure."""

    method: str = option("method", default="peagle", choices=METHODS)
    k: int = option("drafts per round", default=7, short="-K", type=positive, metavar="K")
    concurrency: tuple[int, ...] = option(
        "requests at once", default=(1, 32), type=list_of_positive, metavar="N,.."
    )
    rounds_per_call: int | None = rounds_per_call_option()
    profile: bool = option("also trace some calls, for the kernels of a round", default=False)
    max_tokens: int = option("new tokens per prompt", default=256, type=positive, metavar="N")
    dtype: str | None = option("float32 or bfloat16; by default the device's", default=None)
    sha: str | None = option("commit, on a machine without git", default=None)
    out: Path = option("rows", default=rows.RESULTS / "host.jsonl", type=Path, metavar="FILE.jsonl")


@dataclass
class Clock:
    """Seconds by part of a round, while `is_on`."""

    is_on: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    watched: list[tuple] = field(default_factory=list)

    def watch(self, owner, name: str, part: str) -> None:
        """Counts the time of all calls of `owner.name` until `restore`."""
        function = getattr(owner, name)
        self.watched.append((owner, name, function))
        setattr(owner, name, self._timed(function, part))

    def restore(self) -> None:
        """Puts the watched functions back."""
        while self.watched:
            setattr(*self.watched.pop())

    def _timed(self, function: Callable, part: str) -> Callable:
        def timed(*args, **named):
            start = time.perf_counter()
            result = function(*args, **named)
            if self.is_on:
                spent = time.perf_counter() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + spent
            return result

        return timed

    def watch_engine(self, engine: Engine) -> None:
        """The parts of a round; "dispatch" and "commit" contain others."""
        self.watch(engine.scheduler, "schedule", "schedule")
        self.watch(engine.programs, "_dispatch", "dispatch")
        for name in ("changes", "upload"):
            self.watch(transfer.Resident, name, "plan")
        self.watch(programs, "Result", "output")
        self.watch(transfer.Result, "fetch", "fetch")
        self.watch(engine, "_commit", "commit")


def measure(
    engine: Engine, prompts: Sequence, max_tokens: int, concurrency: int, clock: Clock
) -> dict:
    """Microseconds of a round at a full batch, of greedy requests, and of its parts."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    pool = itertools.cycle(prompts)
    each, made, emitted = [], [], 0
    clock.seconds.clear()
    for _ in range(_BATCHES):
        requests = [engine.add_request(next(pool), params) for _ in range(concurrency)]
        settled = 0
        while engine.has_work:
            settled = settled + 1 if is_full(engine, concurrency) else 0
            clock.is_on = settled >= SETTLED
            before = sum(request.rounds for request in requests)
            start = time.perf_counter()
            updates = engine.step()
            spent = time.perf_counter() - start
            rounds = (sum(request.rounds for request in requests) - before) / concurrency
            if clock.is_on and rounds:
                each.append(spent / rounds)
                made.append(rounds)
                emitted += sum(len(tokens) for _, tokens in updates)
    total = sum(made)
    quantile = lambda share: 1e6 * float(np.quantile(each, share))
    return {
        "rounds": round(total),
        "us_per_round": 1e6 * statistics.median(each),
        "us_fastest": quantile(0.1),
        "us_slowest": quantile(0.9),
        "tokens_per_round": emitted / total / concurrency,
        "us_parts": {part: 1e6 * spent / total for part, spent in clock.seconds.items()},
    }


def profile(engine: Engine, prompts: Sequence) -> dict:
    """Kernels of a round, and the share of the time in which one runs; nothing without a GPU."""
    params = SamplingParams(max_tokens=_TRACED_TOKENS, ignore_eos=True)
    found = profile_rounds(engine, prompts, params, rounds=_TRACED)
    return {} if found is None else found.as_row(engine.target_config.num_layers)


def host_rounds(options: HostOptions) -> list[dict]:
    """Measures every cell and appends its row to `options.out`."""
    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    dtype = runs.choose_dtype("auto" if options.dtype is None else options.dtype)
    target, heads, tokenizer = runs.load_methods(None, [], dtype=dtype)
    config = CellsConfig(
        concurrencies=options.concurrency,
        num_draft=options.k,
        max_num_seqs=max(options.concurrency),
        max_model_len=1024,
        prefill_rows=min(8, max(options.concurrency)),
        rounds_per_call=options.rounds_per_call,
        dtype=dtype,
    )
    head = heads.get(options.method)
    engine = Engine(target, head, config, tokenizer=tokenizer)
    engine.warm_up()
    _, prompts = prompt_set("HumanEval", tokenizer, prompt_tokens=64, limit=None)
    run = lambda concurrency: measure(engine, prompts, options.max_tokens, concurrency, clock)
    clock, done = Clock(), []
    for concurrency in options.concurrency:
        run(concurrency)  # warms up
        done.append({"concurrency": concurrency, **run(concurrency)})
        if options.profile:
            done[-1] |= profile(engine, prompts[:concurrency])
    clock.watch_engine(engine)
    for row in done:
        row["us_parts"] = run(row["concurrency"])["us_parts"]
    clock.restore()
    common = {
        "kind": "host-round",
        "model": "embedded",
        "dtype": dtype,
        "method": options.method,
        "num_speculative_tokens": engine.config.num_draft,
        "rounds_per_call": engine.config.repeat,
        "program": "greedy" if engine.programs.greedy else "with branches",
        **rows.environment(options.sha or os.environ.get("PEAGLE_SHA")),
        "command": shlex.join(["python", "-m", "bench.host_round", *sys.argv[1:]]),
    }
    done = [rows.rounded(common | row) for row in done]
    for row in done:
        rows.append(options.out, row)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_round", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, HostOptions)
    for row in host_rounds(HostOptions.of(vars(parser.parse_args(argv)))):
        parts = ", ".join(f"{part} {us:.0f}" for part, us in row["us_parts"].items())
        print(f"x{row['concurrency']}: {row['us_per_round']:.0f} us a round; {parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
