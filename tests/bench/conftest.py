"""The tiny model of the command line tests."""

import pytest

from tests import programs
from tests.cli.conftest import folders

__all__ = ["folders"]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield
