"""Argument types and options shared by the command lines of all benches."""

import argparse
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PRESET_SUFFIX = "-fp8"  # suffix of presets with fp8 linear layers


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def list_of_positive(text: str) -> list[int]:
    return sorted({positive(item) for item in text.split(",")})


def add_rows(parser: argparse.ArgumentParser, out: str) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / out, metavar="FILE.jsonl", help="rows are appended")
    add("--sha", help="commit for the rows, where git is not at hand (or PEAGLE_SHA)")
    add("--no-cache", action="store_true", help="do not keep compiled programs on disk")
