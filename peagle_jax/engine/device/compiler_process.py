"""A process that compiles programs onto disk for its parent:
`python -m peagle_jax.engine.device.compiler_process FD PID`.

See `compilation`. It reads a `Setup` and then jobs from a connection, answers each with None, a
list or a `Failure`, and ends with its parent.
"""

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import jax

from peagle_jax.devices import Devices
from peagle_jax.engine.device import stored_programs
from peagle_jax.engine.device.compilation import Failure, Job, Recipe, Setup, messages, unpickle
from peagle_jax.engine.device.program import Program
from peagle_jax.engine.device.programs import Programs

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serves one parent; returns 0 once it has ended."""
    _end_with_parent(int(arguments[1]))
    # In the background of the parent's terminal: after `stty tostop` a message would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    connection = Connection(int(arguments[0]))
    inbox = messages(connection)
    compiler = _Compiler(next(inbox, None))
    for job in inbox:
        connection.send_bytes(pickle.dumps(compiler.answer(job)))
    return 0


class _Compiler:
    """The programs of the recipes, made when the first of each is asked for."""

    def __init__(self, setup: Setup | None):
        if setup is None:  # the parent ended
            sys.exit(0)
        own = dict(stored_programs.settings())
        for name, value in setup.settings.items():
            if own.get(name) != value:
                jax.config.update(name, value)
        if setup.cache is not None:
            stored_programs.use_library_cache(Path(setup.cache))
        self._pickled, self._recipes = setup.recipes, []
        self._made: dict[int, tuple] = {}

    def answer(self, job: Job) -> list[tuple[Program, str]] | Failure | None:
        """Compiles a program of a recipe onto disk, or lists what the recipe lacks there. Returns
        the list, or why there is nothing."""
        try:
            self._recipes = self._recipes or unpickle(self._pickled)
        except Exception as error:  # of code that only the parent has, as what a script defines
            return Failure(stored_programs.line(error), is_final=False)
        try:
            if job.recipe not in self._made:
                recipe = self._recipes[job.recipe]
                made = (*programs_of(recipe), ()) if isinstance(recipe, Recipe) else recipe()
                self._made[job.recipe] = made
            programs, state, keys = self._made[job.recipe]
            if job.key is None:
                missing = programs.not_on_disk(keys, state) or ()
                return [(key, str(programs.file_of(key, state))) for key in missing]
            programs.store(job.key, state)
            path = programs.file_of(job.key, state)
        except Exception as error:  # the parent decides what an error means
            reason = stored_programs.line(error)
            return Failure(reason, is_final="RESOURCE_EXHAUSTED" not in reason)
        if path is not None and path.exists():
            return None
        return Failure(f"it cannot be kept in {programs.folder}", is_final=False)


def programs_of(recipe: Recipe) -> tuple[Programs, object]:
    """The programs of a recipe, and the shapes of their state. They compile and cannot run."""
    programs = Programs(
        recipe.target,
        recipe.drafter,
        recipe.config,
        taps=recipe.taps,
        accept=recipe.accept,
        devices=Devices.of(recipe.config),
    )
    return programs, programs.init_state(recipe.target_config, recipe.drafter_config)


def _end_with_parent(parent: int) -> None:
    """Lets the kernel end this process with its parent, also in the middle of a program. Linux
    only; elsewhere it ends after the program."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
