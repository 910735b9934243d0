"""Which tests the default suite, the slow one and the exhaustive one run."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from peagle_jax.cli import runs
from tests import random_shapes
from tests.suite import FEW_WORKERS, LONGEST, OTHER_SUITE, TOGETHER, covering, scope_of

ROOT = Path(__file__).parents[1]


def cases(**sizes: int) -> list[SimpleNamespace]:
    """Items of a test with these parameters: name=number of values."""
    params = [
        dict(zip(sizes, one, strict=True)) for one in itertools.product(*map(range, sizes.values()))
    ]
    return [SimpleNamespace(callspec=SimpleNamespace(params=one)) for one in params]


def values(items: list[SimpleNamespace]) -> set:
    return {value for item in items for value in item.callspec.params.items()}


def test_few_cases_have_each_value_of_each_parameter():
    items = cases(family=8, devices=3)
    chosen = covering(items, [], 8)
    assert values(chosen) == values(items)
    numbers = [item.callspec.params["devices"] for item in chosen]
    assert sorted(map(numbers.count, range(3))) == [2, 3, 3]


def test_few_workers_take_whole_folders_and_many_take_files():
    assert {scope_of(f"{folder}/test_a.py", 2) for folder in TOGETHER} == set(TOGETHER)
    for file, num_workers in (
        ("tests/test_a.py", 1),
        ("tests/engine/test_a.py", 2),
        ("tests/cli/test_a.py", FEW_WORKERS + 1),
    ):
        assert scope_of(file, num_workers) == file


def test_what_comes_first_exists():
    assert all((ROOT / folder).is_dir() for folder in TOGETHER)
    assert set(LONGEST) <= {file.name for file in (ROOT / "tests").rglob("test_*.py")}


def test_a_command_in_a_test_leaves_the_caches_of_the_user_and_of_the_suite_alone(tmp_path_factory):
    before = jax.config.jax_compilation_cache_dir
    folder = runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())
    assert jax.config.jax_compilation_cache_dir == before == os.environ["JAX_COMPILATION_CACHE_DIR"]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), None), ((3, 5, 7), "float32"), ((1100,), "bfloat16")]
)
def test_normal_numbers_of_few_shapes_have_the_bits_of_jax(shape, dtype):
    key = jax.random.key(5)
    found, wanted = jax.random.normal(key, shape, dtype), random_shapes.of_jax(key, shape, dtype)
    assert jax.random.normal is random_shapes.normal is not random_shapes.of_jax
    assert (found.shape, found.dtype, found.weak_type) == (shape, wanted.dtype, wanted.weak_type)
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    traced = jax.jit(lambda key: jax.random.normal(key, shape, dtype))(key)
    assert np.asarray(traced).tobytes() == np.asarray(wanted).tobytes()


def test_ci_and_the_fixture_of_cases_mean_the_same_suite():
    """`num_cases` compares this text with that of -m."""
    for name in (".ci/run", "CONTRIBUTING.md"):
        assert f'-m "{OTHER_SUITE}"' in Path(ROOT, name).read_text(encoding="utf-8")
