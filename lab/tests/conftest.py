"""Fixtures of the tests of the product."""

from tests.cli.conftest import folders
from tests.kernels.conftest import chip, interpreted, race_free

__all__ = ["chip", "folders", "interpreted", "race_free"]
