"""The server's name and version in protocols."""

from importlib.metadata import PackageNotFoundError, version

NAME = "peagle-jax"


def _version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:  # run from a source tree
        return "0+source"


VERSION = _version()
