"""Jobs that note what they do. Each has a process of its own, so this file must not import jax."""

import os
import time
from pathlib import Path

from lab.kernel_jobs import Job


def note(job: Job, what: str) -> None:
    """Adds a line to the file that is named by the operation."""
    with Path(job.op).open("a") as file:
        file.write(f"{what} {job.spec}\n")


def compile_(job: Job, turn) -> bool:
    note(job, "compile")
    if job.spec == "slow":
        time.sleep(3600)
    return job.spec != "alone"


def measure(job: Job, turn) -> list[dict]:
    with turn:
        if job.spec == "bad":
            raise ValueError("too large\nand so on")
        if job.spec == "dead":  # the others still get their turns
            os._exit(1)
        note(job, "begin")
        note(job, "end")
    return [{"spec": job.spec, "process": os.getpid(), "reference": job.reference}]
