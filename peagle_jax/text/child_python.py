"""How this process starts another one of the same interpreter that runs a module of this
project."""

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """The command of a child. It imports nothing from the folder that it starts in (-P): what lies
    there may be another version of this code, or belong to somebody else."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Variables of a child, whose imports come from where this process has its own from."""
    paths = (path or os.getcwd() for path in sys.path)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
