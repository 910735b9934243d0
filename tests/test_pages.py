"""The pages: links lead somewhere, commands parse, measurements name their commit."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import PROGRAM
from convert.__main__ import _parser as convert_parser
from peagle_jax.cli.options import parser as generate_parser
from peagle_jax.training.options import parser as train_parser
from serving.client.options import parser as client_parser
from serving.sources import parser as serve_parser

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "lab").glob("*.md")),
    *(
        ROOT / name / "README.md"
        for name in ("peagle_jax/assets", "bench/data", "bench/results", "tests")
    ),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GENERATED = re.compile(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench:\1 -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(
    r"\d ?(ms|us|µs|seconds|minutes|%|tokens/s|tokens per second|tokens per "
    r"round|[KMG]i?B/s|TB/s)(?!\w)"
    r"|\d (s|min)(?=[,.;:) ])|\d times (faster|slower|plain)|\d\.\d+x"
)
COMMIT = re.compile(r"\bcommits?\s[0-9a-f]{7,12}\b", re.IGNORECASE)
PARSERS = {
    "peagle-bench": PROGRAM.parser,
    "peagle-convert": convert_parser,
    "peagle-generate": generate_parser,
    "peagle-train": train_parser,
}
WITHOUT_MEASUREMENTS = ("README.md", "docs/results.md", "docs/decode-step.md", "docs/kernels.md")
"""Pages whose measurements all stand in generated blocks, with their commits."""
WITH_MEASUREMENTS = (
    "docs/algorithm.md",
    "docs/architecture.md",
    "docs/conversion.md",
    "docs/portability.md",
    "docs/training.md",
    "lab/kernels.md",
    "lab/log.md",
    "peagle_jax/assets/README.md",
)
"""Other pages with measurements. On the rest most times and sizes are limits, rules or
calculations.
"""


def written_by_hand(page: Path) -> str:
    return FENCED.sub("", GENERATED.sub("", page.read_text(encoding="utf-8")))


def test_the_readme_is_short_and_shows_a_plot_and_the_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text) == [
        "bench/results/served.png",
        "docs/page.png",
    ]


def test_prose_stays_within_its_budget():
    """Words of all pages; cells and rules of tables are none."""
    pages = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *PAGES[1:]]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert sum(bool(re.search(r"\w", word)) for word in text.split()) <= 45_000


def test_the_changelog_has_one_line_a_change():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert [line for line in lines if len(line) > 120 or line.startswith(" ")] == []


@pytest.mark.parametrize("name", WITHOUT_MEASUREMENTS)
def test_measurements_stand_in_generated_blocks(name):
    wrong = [line for line in written_by_hand(ROOT / name).splitlines() if MEASURED.search(line)]
    assert wrong == []


@pytest.mark.parametrize("name", WITH_MEASUREMENTS)
def test_measurements_name_their_commit(name):
    """Some commit in the same section; numbers of a paper or of vLLM have none."""
    for section in re.split(r"^(?=## )", written_by_hand(ROOT / name), flags=re.MULTILINE):
        lines = [line for line in section.splitlines() if MEASURED.search(line)]
        own = [line for line in lines if not re.search("paper|vLLM", line)]
        assert not own or COMMIT.search(section), own


@pytest.mark.parametrize(
    "text",
    [
        "takes 3.4 ms",
        "7 seconds after",
        "5 % less",
        "300 tokens/s",
        "1.5 s later",
        "2.19 times plain",
        "AL (1.4x)",
    ],
)
def test_a_measurement_is_recognised(text):
    assert MEASURED.search(text)
    assert not MEASURED.search("K = 7 on 164 prompts, Python 3.12, port 8000, 48 layers")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {
                re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings
            }
            assert anchor in anchors, target


ROOMS = ("", "peagle_jax", "pallas_kernels", "pallas_kernels/moe", "serving", "tests")
"""Folders from which a page may name a file."""


@pytest.mark.parametrize("name", NAMES)
def test_files_and_modules_that_a_page_names_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    files = set(re.findall(r"`([a-z][a-z0-9_./-]*/[\w.-]+\.[a-z]+)(?=[`:])", text))
    assert [one for one in files if not any((ROOT / room / one).exists() for room in ROOMS)] == []
    modules = set(re.findall(r"python -m ((?:bench|lab)[\w.]*)", text))
    paths = [ROOT / one.replace(".", "/") for one in modules]
    assert [
        path
        for path in paths
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ] == []


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(program, arguments) of the commands of this project in the blocks without a language."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|[|]", line):
                program = re.match(r" ?(peagle-[a-z]+)(?= )", part)
                if program and program[1] in PARSERS:
                    found.append((program[1], shlex.split(part, comments=True)[1:]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name):
    for program, arguments in commands(ROOT / name):
        if "--help" not in arguments:
            PARSERS[program]().parse_args(arguments)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command line and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


@pytest.mark.parametrize(
    "whole", [*PARSERS.values(), serve_parser, client_parser], ids=lambda one: one.__module__
)
def test_help_describes_each_option_with_at_most_one_default(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a default path reads well from any folder
    for parser in parsers(whole()):
        shown = " ".join(parser.format_help().split())
        assert "../" not in shown
        assert "(default [])" not in shown
        for action in parser._actions:
            text = action.help or ""
            about, *defaults = re.split(r"\(default:? ", text)
            is_bare = action.option_strings and not about.strip()
            assert not is_bare, (parser.prog, action.option_strings)
            assert len(defaults) <= 1, (parser.prog, action.option_strings, text)


def test_the_readme_shows_every_command():
    text = README.read_text(encoding="utf-8")
    scripts = re.search(
        r"^\[project\.scripts\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )[1]
    assert [one for one in re.findall(r"^([\w-]+) =", scripts, re.M) if one not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_that_people_write_are_short(name):
    drawn = re.compile(r"<!-- (\w+):([\w-]+) -->\n.*?<!-- /\1:\2 -->", re.DOTALL)
    text = drawn.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > 120] == []
