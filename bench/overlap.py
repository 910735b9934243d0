"""Word sequences that texts share with HumanEval: `python -m bench.overlap FOLDER_OR_FILES...`.

Prints how many 10-grams of HumanEval's prompts and solutions occur in the given files, and those with six words.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

_TOKEN = re.compile(r"\w+|[^\w\s]")
_HUMAN_EVAL = Path(__file__).parent / "data" / "HumanEval.jsonl"
_LISTED = 50
_SUFFIXES = {".py", ".txt", ".md"}


def grams(text: str, n: int = 10) -> set[tuple[str, ...]]:
    """The different sequences of `n` words and operators in a text."""
    tokens = _TOKEN.findall(text)
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def shared_grams(
    texts: Iterable[str], references: Iterable[str], n: int = 10
) -> set[tuple[str, ...]]:
    """The different n-grams that occur in a text and in a reference."""
    wanted = set().union(*(grams(reference, n) for reference in references))
    return set().union(*(grams(text, n) & wanted for text in texts))


def wordy(found: set[tuple[str, ...]], least: int = 6) -> set[tuple[str, ...]]:
    """The n-grams of which at least `least` tokens are words, that is, have a letter."""
    return {gram for gram in found if sum(map(_has_letter, gram)) >= least}


def _has_letter(token: str) -> bool:
    return any(char.isalpha() for char in token)


def human_eval(path: Path = _HUMAN_EVAL) -> list[str]:
    """Prompts with their solutions."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["prompt"] + row["canonical_solution"] for row in rows]


def read_texts(paths: list[Path]) -> list[str]:
    """The contents of files, and of the text files in folders.

    Raises:
      FileNotFoundError: a path does not exist.
    """
    files = []
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES)
        files += found if path.is_dir() else [path]
    return [
        file.read_text(encoding="utf-8", errors="replace") for file in files if not file.is_dir()
    ]


def main(argv: list[str] | None = None) -> None:
    """Prints the numbers and at most 50 of the shared 10-grams with six words or more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FOLDER_OR_FILE")
    paths = parser.parse_args(argv).paths
    references = human_eval()
    found = shared_grams(read_texts(paths), references)
    long = wordy(found)
    print(f"10-grams of HumanEval: {len(set().union(*map(grams, references)))}")
    print(f"in the given texts: {len(found)}")
    print(f"of these with six words or more: {len(long)}")
    for gram in sorted(long)[:_LISTED]:
        print("  " + " ".join(gram))


if __name__ == "__main__":
    main()
