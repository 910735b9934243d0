"""Word sequences that texts share with HumanEval: `python -m lab.overlap FOLDER_OR_FILES...`.

Prints how many 10-grams of HumanEval's prompts and solutions occur in the given files, and those
with six words.
"""

import argparse
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import rows

_TOKEN = re.compile(r"\w+|[^\w\s]")
_HUMAN_EVAL = rows.DATA / "HumanEval.jsonl"
_LISTED = 50
_SUFFIXES = {".py", ".txt", ".md"}


def _sequences(text: str, n: int) -> Iterator[tuple[str, ...]]:
    """The sequences of `n` words and operators of a text, one at a time: a text may be larger than
    memory holds grams."""
    last: deque[str] = deque(maxlen=n)
    for match in _TOKEN.finditer(text):
        last.append(match[0])
        if len(last) == n:
            yield tuple(last)


def grams(texts: Iterable[str], n: int = 10) -> set[tuple[str, ...]]:
    """The different sequences of `n` words and operators in texts."""
    return {gram for text in texts for gram in _sequences(text, n)}


def shared_grams(
    texts: Iterable[str], wanted: set[tuple[str, ...]], n: int = 10
) -> set[tuple[str, ...]]:
    """The n-grams of `wanted` that occur in a text."""
    return {gram for text in texts for gram in _sequences(text, n) if gram in wanted}


def wordy(found: set[tuple[str, ...]], least: int = 6) -> set[tuple[str, ...]]:
    """The n-grams of which at least `least` tokens are words, that is, have a letter."""
    return {gram for gram in found if sum(map(_has_letter, gram)) >= least}


def _has_letter(token: str) -> bool:
    return any(char.isalpha() for char in token)


def human_eval() -> list[str]:
    """Prompts with their solutions."""
    return [row["prompt"] + row["canonical_solution"] for row in rows.read([_HUMAN_EVAL])]


def read_texts(paths: list[Path]) -> Iterator[str]:
    """The contents of files, and of the text files in folders.

    Raises:
      FileNotFoundError: a path does not exist.
    """
    for path in paths:
        inside = (p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        for file in sorted(inside) if path.is_dir() else [path]:
            yield file.read_text(encoding="utf-8", errors="replace")


def main(argv: list[str] | None = None) -> None:
    """Prints the numbers and at most 50 of the shared 10-grams with six words or more."""
    parser = argparse.ArgumentParser(prog="python -m lab.overlap", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    paths = parser.parse_args(argv).paths
    wanted = grams(human_eval())
    found = shared_grams(read_texts(paths), wanted)
    long = wordy(found)
    print(f"10-grams of HumanEval: {len(wanted)}")
    print(f"in the given texts: {len(found)}")
    print(f"of these with six words or more: {len(long)}")
    for gram in sorted(long)[:_LISTED]:
        print("  " + " ".join(gram))


if __name__ == "__main__":
    main()
