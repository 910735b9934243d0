"""docs/reliability.md: the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
ITEM = re.compile(r"^- (?P<defect>.+?):(?P<tests>(?: `[^`]+`,?|\n  `[^`]+`,?)*)$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def section() -> str:
    """The text below the heading of the defects."""
    heading = "## Defects and the tests that find them"
    return PAGE.read_text(encoding="utf-8").partition(heading)[2]


def defects() -> dict[str, list[tuple[str, str]]]:
    """Defect -> (file, test function) of each test that finds it."""
    return {match["defect"]: TEST.findall(match["tests"]) for match in ITEM.finditer(section())}


def test_every_defect_has_a_test():
    assert len(defects()) == len(re.findall(r"^- ", section(), re.MULTILINE)) > 30
    assert [defect for defect, tests in defects().items() if not tests] == []


@pytest.mark.parametrize(
    "file", sorted({file for tests in defects().values() for file, _ in tests})
)
def test_the_tests_of_a_file_exist(file):
    path = ROOT / file if file.startswith("lab/") else ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {name for tests in defects().values() for one, name in tests if one == file}
    assert named <= there
