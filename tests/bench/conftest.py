"""The tiny model of the command line tests."""

from tests.cli.conftest import folders

__all__ = ["folders"]
