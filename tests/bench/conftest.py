"""The tiny model of the command line tests."""

import pytest

from bench import cells, decode_step
from peagle_jax.cli import runs
from peagle_jax.method import step
from tests import programs
from tests.cli.conftest import folders

__all__ = ["folders"]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield


@pytest.fixture
def compiled_here(tmp_path, monkeypatch):
    """Keys of the programs that `--jobs` compiles, in this process. After it no round is traced."""
    stored = []

    def compile_missing(recipes, missing, **_):
        for make in recipes:
            programs, state, keys = make()
            for key in programs.not_on_disk(keys, state):
                programs.store(key, state)
                stored.append(key)
        monkeypatch.setattr(step, "speculative_step", None)
        return {}

    monkeypatch.setattr(cells, "compile_missing", compile_missing)
    for name in ("keep_compiled_programs", "programs_folder"):
        monkeypatch.setattr(runs, name, lambda home: tmp_path / "programs")
    yield stored
    decode_step._shapes.cache_clear()
