"""Folders and tokenizers of the families, built once for each test module."""

from pathlib import Path

import pytest

from peagle_jax.text.tokenizer import Tokenizer
from tests.text.families import FAMILIES, write


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Read only: a test that changes a folder writes its own."""
    return {family: write(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def tokenizers(folders) -> dict[str, Tokenizer]:
    return {family: Tokenizer(folder) for family, folder in folders.items()}
