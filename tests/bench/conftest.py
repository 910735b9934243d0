"""The tiny model of the command line tests."""

from tests.cli.conftest import folders, shared_programs

__all__ = ["folders", "shared_programs"]
