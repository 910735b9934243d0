"""`peagle-bench matrix`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import Command, Options, option


@dataclass(frozen=True, kw_only=True)
class MatrixOptions(Options):
    pages: tuple[Path, ...] = option(
        "pages whose portability:NAME blocks are redrawn; without any the matrix is printed",
        default=(), type=Path, nargs="*", metavar="FILE",
    )  # fmt: skip
    tests: bool = option("print the test that shows each word", default=False)


def run(options: MatrixOptions) -> int:
    from bench import portability

    for page in options.pages:
        page.write_text(portability.update(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)
    if options.tests:
        print(portability.listed())
    elif not options.pages:
        print(portability.checked())
    return 0


COMMAND = Command(
    name="matrix",
    summary="what runs where and how it was checked, with the test that shows it",
    examples=("matrix --tests", "matrix --pages README.md docs/portability.md"),
    description="""
Draws what runs on CPUs, GPUs and TPUs and how it was checked: measured, compiled, interpreted, reference or
refused (docs/portability.md). The words and their tests stand in tests/portability.toml, so the command needs a
clone of the repository. Nothing is run.
""",
    options=MatrixOptions,
    run=run,
)
