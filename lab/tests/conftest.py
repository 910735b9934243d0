"""Fixtures of the tests of the product."""

from tests.cli.conftest import folders
from tests.kernels.conftest import chip

__all__ = ["chip", "folders"]
