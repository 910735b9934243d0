"""`peagle-bench report`: its options."""

from dataclasses import dataclass
from pathlib import Path

from bench.command import RESULTS, Command, Options, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    results: Path = option("folder of the rows", default=RESULTS, type=Path, metavar="DIR")
    pages: tuple[Path, ...] | None = option(
        "pages whose bench:NAME blocks are redrawn; without it README.md and all pages that have blocks, "
        "or with --results none", default=None, type=Path, nargs="*", metavar="FILE",
    )  # fmt: skip
    plots: Path | None = option(
        "folder for plots; the folder of the rows without it",
        default=None,
        type=Path,
        metavar="DIR",
    )


def run(options: ReportOptions) -> int:
    from bench import report

    pages = options.pages
    if pages is None:
        pages = report.PAGES if options.results.resolve() == RESULTS.resolve() else ()
    written = report.report(options.results, pages, options.plots or options.results)
    print(*written, sep="\n")
    return 0


COMMAND = Command(
    name="report",
    summary="redraws the tables and plots of README.md and docs/ from the stored rows",
    examples=("report",),
    description="""
Draws every block between <!-- bench:NAME --> and <!-- /bench:NAME --> of the pages, and the plots, from the
rows in bench/results. Of several rows of the same measurement the newest is shown. Plots need matplotlib:
python -m pip install 'peagle-jax[plots]'.
""",
    options=ReportOptions,
    run=run,
)
