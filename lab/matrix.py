"""`python -m lab matrix`: what runs where and how it was checked."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, Options, option
from lab import portability


@dataclass(frozen=True, kw_only=True)
class MatrixOptions(Options):
    """Options of this command.

    Args:
      pages: pages whose portability:NAME blocks are redrawn; without any the matrix is printed
      tests: print the test that shows each word
    """

    pages: tuple[Path, ...] = option((), type=Path, nargs="*", metavar="FILE")
    tests: bool = False


def run(options: MatrixOptions) -> int:
    """Redraws pages, or prints the matrix."""
    for page in options.pages:
        page.write_text(portability.update(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)
    if options.tests:
        print(portability.listed())
    elif not options.pages:
        print(portability.checked())
    return 0


COMMAND = Command(
    examples=("matrix --tests", "matrix --pages README.md docs/portability.md"),
    description="""
Draws what runs on CPUs, GPUs and TPUs and how it was checked: measured, compiled, interpreted,
reference or refused (docs/portability.md). The words and their tests stand in
lab/data/portability.toml. Nothing is run.
""",
    options=MatrixOptions,
    run=run,
)
