"""docs/reliability.md: the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
ROW = re.compile(r"^\| (?P<defect>[^|]+) \| (?P<tests>[^|]*) \|$")
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def defects() -> dict[str, list[tuple[str, str]]]:
    """Defect -> (file, test function) of each test that finds it, of every table of defects."""
    _, _, part = PAGE.read_text(encoding="utf-8").partition(
        "## Defects and the tests that find them"
    )
    matches = filter(None, map(ROW.match, part.splitlines()))
    found = {match["defect"]: TEST.findall(match["tests"]) for match in matches}
    return {defect: tests for defect, tests in found.items() if defect != "defect"}


def test_every_defect_has_a_test():
    assert len(defects()) > 30
    assert [defect for defect, tests in defects().items() if not tests] == []


@pytest.mark.parametrize(
    "file", sorted({file for tests in defects().values() for file, _ in tests})
)
def test_the_tests_of_a_file_exist(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {name for tests in defects().values() for one, name in tests if one == file}
    assert named <= there
