"""Files of checkpoints are written to memory."""

import pytest

from tests import memory


@pytest.fixture
def tmp_path():
    with memory.folder() as path:
        yield path
