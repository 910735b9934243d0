"""Kernels compiled side by side and measured one at a time (`peagle-bench kernels --jobs`).

Tracing and compiling take seconds of a CPU for each spec, and measuring takes less. Each spec has a process of its own,
twice: first all specs are compiled onto disk, then each is measured while no other uses the GPU. XLA also runs kernels
when it compiles a reference, to choose the fastest, so nothing compiles for the first time while a spec is measured. A
process returns its memory of the GPU when it ends.
"""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from bench.compile_cells import CHILD_ENVIRONMENT, environment
from bench.progress import progress_bar

_log = logging.getLogger(__name__)

Job = tuple[str, str, bool]
"""(operation, spec, whether with all tuning configs)."""


def side_by_side(
    jobs: Sequence[Job], processes: int, work: Callable[[Job, Any], list[dict]]
) -> Iterator[dict]:
    """Yields the rows of all jobs as they are measured; a job that fails is logged and has none.

    Args:
      work: a function at the top level of a module: (job, turn) -> rows. `turn` is a lock to hold while the GPU is
        used; None in the first pass, which only compiles.
    """
    spawn = multiprocessing.get_context("spawn")
    with environment(CHILD_ENVIRONMENT), spawn.Manager() as manager:
        for title, turn in (("compiling", None), ("measuring", manager.Lock())):
            with (
                ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool,
                progress_bar(desc=title, total=len(jobs), unit="spec") as bar,
            ):
                futures = {pool.submit(work, job, turn): job for job in jobs}
                for future in as_completed(futures):
                    bar.update()
                    if error := future.exception():
                        if turn is not None:
                            log_failure(*futures[future][:2], error)
                        continue
                    yield from future.result()


def log_failure(op: str, spec: str, error: BaseException) -> None:
    """Logs the first line of an error."""
    said = str(error).splitlines() or [""]
    _log.error("%s %s: %s: %s", op, spec, type(error).__name__, said[0])


def measure_job(job: Job, turn: Any) -> list[dict]:
    """The rows of a job, without the fields that all rows share; without a turn it only compiles.

    What cannot be compiled is logged in both passes.
    """
    import jax

    from bench.kernels import Prepared, rows_of
    from pallas_kernels.device import describe
    from peagle_jax import runs

    runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))

    def measure(case, chip: str) -> dict | None:
        prepared = Prepared(case)
        if turn is None:
            return None
        with turn:
            return prepared.measure(chip)

    made = rows_of(job, describe(jax.devices()[0]), measure)
    return [row for row in made if row is not None]
