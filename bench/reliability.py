"""`peagle-bench reliability`: runs the randomised tests and records their numbers of cases."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from bench import report, rows
from bench.commands.reliability import Options
from peagle_jax import ConfigError

_ROOT = Path(__file__).parents[1]


def reliability(options: Options, environment: dict) -> list[dict]:
    """Runs every test that takes the fixture `num_cases`, and appends a row for each kind of case.

    Redraws the page's tables from all rows in the folder of the new ones.

    Returns:
      The new rows.

    Raises:
      ConfigError: no such page, no test has cases of the kinds in `options.only`, or pytest does not run.
    """
    if not options.page.is_file():
        raise ConfigError(f"{options.page}: there is no such page to draw tables in")
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "results.xml")
        code = subprocess.run(_command(options, xml), cwd=_ROOT, check=False).returncode
        if code not in (0, 1) or not xml.is_file():
            raise ConfigError(f"pytest ended with exit code {code}; its output says why")
        found = [rows.rounded({"kind": "reliability", **row, **environment}) for row in tried(xml)]
    if not found:
        raise ConfigError(f"no test tries {' or '.join(options.only) or 'random cases'}")
    for row in found:
        rows.append(options.out, row)
    some = report.newest(rows.read(sorted(options.out.parent.glob("*.jsonl"))))
    text = options.page.read_text(encoding="utf-8")
    options.page.write_text(report.update_markdown(text, some), encoding="utf-8")
    return found


def _command(options: Options, xml: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "randomised and not gpu"]
    command += [f"--junitxml={xml}", "-o", "junit_family=xunit1", *options.tests]
    for kind in options.only:
        command += ["--only-kind", kind]
    if options.cases:
        command += ["--cases", str(options.cases), "--timeout", "0"]  # many cases take long
    return command


def tried(xml: Path) -> Iterator[dict]:
    """A row for each kind of case in pytest's JUnit file: cases, tests, failed tests, seconds."""
    found: dict[str, dict] = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
        is_failed = case.find("failure") is not None or case.find("error") is not None
        for one in case.iter("property"):
            if one.get("name") != "tried":
                continue
            number, _, kind = one.get("value").partition(" ")
            row = found.setdefault(kind, dict(tried=kind, cases=0, tests=0, failed=[], seconds=0.0))
            row["cases"] += int(number)
            row["tests"] += 1
            row["seconds"] += float(case.get("time"))
            if is_failed:
                row["failed"].append(name)
    yield from found.values()
