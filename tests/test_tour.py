"""docs/tour.md and CONTRIBUTING.md: every file, function, class and test that they name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/tour.md", "CONTRIBUTING.md")
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|proto|toml|sh))(?:::([\w.]+))?`")


@cache
def defined(file: str) -> set[str]:
    """Functions, classes, assigned names and `Class.member`s of a file."""
    names = set()

    def collect(body, prefix=""):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(prefix + one.id for one in targets if isinstance(one, ast.Name))

    collect(ast.parse((ROOT / file).read_text(encoding="utf-8")).body)
    return names


def missing(text: str) -> list[str]:
    """References `file` and `file::name` of a page that lead nowhere."""
    return [
        f"{file}::{name}" if name else file
        for file, name in NAMED.findall(text)
        if not (ROOT / file).is_file() or (name and name not in defined(file))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 10
    assert missing(text) == []


def test_a_name_that_is_gone_is_noticed():
    text = (
        "`tests/test_tour.py::missing` `tests/test_tour.py::lost` `nowhere.py` "
        "`peagle_jax/method/step.py::State.lost`"
    )
    assert missing(text) == [
        "tests/test_tour.py::lost",
        "nowhere.py",
        "peagle_jax/method/step.py::State.lost",
    ]
