"""What randomised tests tried becomes rows and a table."""

import json

import pytest

from bench import report
from bench.__main__ import main
from bench.reliability import tried

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_a[1]" file="tests/a.py" time="1.5">
  <properties><property name="tried" value="300 damaged files"/></properties></testcase>
<testcase classname="tests.a" name="test_a[2]" file="tests/a.py" time="0.5">
  <properties><property name="tried" value="300 damaged files"/></properties>
  <failure message="no">no</failure></testcase>
<testcase classname="tests.b" name="test_b" file="tests/b.py" time="2">
  <properties><property name="tried" value="20 walks"/><property name="other" value="1 x"/></properties>
</testcase>
<testcase classname="tests.b" name="test_c" file="tests/b.py" time="2">
  <properties><property name="tried" value="7 walks"/></properties><skipped/></testcase>
</testsuite></testsuites>"""


def test_cases_of_a_kind_are_added_up_and_failures_named(tmp_path):
    xml = tmp_path / "results.xml"
    xml.write_text(XML)
    files, walks = tried(xml)
    assert files == {
        "tried": "damaged files", "cases": 600, "tests": 2, "failed": ["tests/a.py::test_a[2]"],
        "seconds": 2.0,
    }  # fmt: skip
    assert (walks["tried"], walks["cases"], walks["failed"]) == ("walks", 20, [])


def test_the_table_has_the_newest_row_of_each_kind_and_number():
    base = {"kind": "reliability", "tried": "walks", "failed": [], "seconds": 1.0, "sha": "abc"}
    some = [
        base | {"cases": 20, "date": "2026-01-01T00:00:00Z", "failed": ["tests/b.py::test_b"]},
        base | {"cases": 20, "date": "2026-01-02T00:00:00Z"},
        base | {"cases": 5000, "date": "2026-01-01T00:00:00Z", "failed": ["tests/b.py::test_b"]},
    ]
    text = report.render("tried", report.newest(some))
    assert "| walks | 20 | passed | 1 | abc | 2026-01-02 |" in text
    assert "| walks | 5,000 | failed: tests/b.py::test_b | 1 | abc | 2026-01-01 |" in text
    assert text.count("walks") == 2


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- bench:tried -->\n<!-- /bench:tried -->\nafter\n")
    return path


@pytest.mark.slow
def test_the_command_runs_the_tests_of_a_kind_and_draws_the_page(tmp_path, page, capsys):
    out = tmp_path / "rows.jsonl"
    argv = ["--cases", "40", "--only", "page pool", "--out", str(out), "--page", str(page)]
    tests = ["tests/engine/test_pages.py", "tests/convert/test_blocks.py"]
    assert main(["reliability", *argv, "--sha", "abc", "--no-cache", *tests]) == 0
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["tried"], row["cases"], row["tests"]) == ("operations on the page pool", 200, 5)
    assert row["failed"] == []
    assert "| operations on the page pool | 200 | passed |" in page.read_text()
    assert "operations on the page pool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(
            ["--only", "unheard of", "tests/engine/test_pages.py"], "no test tries unheard of",
            marks=pytest.mark.exhaustive,
        ),
        (["--page", "nowhere.md"], "no such page"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, page, capsys, argv, message):
    own = ["--out", str(tmp_path / "rows.jsonl"), "--page", str(page), "--sha", "a", "--no-cache"]
    assert main(["reliability", *own, *argv]) == 2
    assert message in capsys.readouterr().err
