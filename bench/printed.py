"""Tables of new rows on the terminal, and texts from the fields of rows. printed.toml has the
columns."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from string import Formatter

from peagle_jax.cli.runs import METHOD_NAMES, table

PRINTED: dict[str, list] = tomllib.loads(
    Path(__file__).with_name("printed.toml").read_text(encoding="utf-8")
)


def show(name: str, done: Sequence[dict], out: Path) -> None:
    """Prints the new rows of a command, in columns that have values, and the file that has them."""
    show_table(*cells(PRINTED[name], [named(row) for row in done]), out)


def show_table(
    header: Sequence[str], lines: Sequence[Sequence[str]], out: Path, *, note: str = ""
) -> None:
    """Prints a table, and the file that has its rows."""
    print(table(header, lines))
    print(f"{note}rows: {out}")


class Fields(dict):
    """Fields of a row by name; None for those that it lacks."""

    def __missing__(self, name: str) -> None:
        return None


def named(row: dict) -> Fields:
    """A row with what a terminal shows instead of its values."""
    named = Fields(row)
    if (method := row.get("method")) in METHOD_NAMES:
        named["method_name"] = METHOD_NAMES[method]
    if "codes" in row:
        named["statuses"] = ", ".join(f"{n:,} {code}" for code, n in row["codes"].items())
    if row.get("bytes_per_second") is not None:
        named["terabytes_per_second"] = row["bytes_per_second"] / 1e12
    return named


def text_of(template: str | Sequence[str], facts: Fields) -> str:
    """A template, or the parts of one; a part whose fields are not all there is empty."""
    if not isinstance(template, str):
        return "".join(text_of(part, facts) for part in template)
    names = [re.split(r"[\[.]", name)[0] for _, name, _, _ in Formatter().parse(template) if name]
    if any(facts[name] is None for name in names):
        return ""
    return template.format(**{name: facts[name] for name in names})


def cells(columns: list, rows: Sequence[Fields]) -> tuple[list[str], list[list[str]]]:
    """Header and lines, without columns that are empty in all lines."""
    lines = [[text_of(text, row) for _, text in columns] for row in rows]
    filled = [place for place in range(len(columns)) if any(line[place] for line in lines)]
    header = [columns[place][0] for place in filled]
    return header, [[line[place] for place in filled] for line in lines]
