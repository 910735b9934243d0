"""Training curves: metrics in CSV files, and their plots."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from peagle_jax.cli import plotting


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step, so that a killed run never leaves half of it."""
    partial = path.with_suffix(path.suffix + ".tmp")
    partial.write_text(text)
    partial.replace(path)


def flatten(report: dict) -> dict[str, float]:
    """{"accuracy": [a0, a1]} -> {"accuracy_0": a0, "accuracy_1": a1}."""
    flat = {}
    for name, value in report.items():
        value = np.asarray(value, np.float64)
        if value.ndim:
            flat |= {f"{name}_{i}": float(x) for i, x in enumerate(value)}
        else:
            flat[name] = float(value)
    return flat


def averages(reports: list[dict]) -> dict[str, float]:
    """Ratio of sums over steps for every metric (numerator, denominator)."""
    fetched = jax.device_get(reports)
    total = lambda name, i: sum(np.asarray(r[name][i], np.float64) for r in fetched)
    return flatten({n: total(n, 0) / np.maximum(total(n, 1), 1e-9) for n in fetched[0]})


@dataclass
class Curves:
    """Rows of numbers in a CSV file; rows past a resumed step are dropped."""

    path: Path
    rows: list[dict[str, float]] = field(default_factory=list)

    def resume(self, step: int) -> None:
        if self.path.exists():
            with self.path.open() as file:
                rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
            rows = [row | {"step": int(row["step"])} for row in rows]
            self.rows = [row for row in rows if row["step"] <= step]

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        lines = [",".join(self.rows[0])]
        lines += [",".join(repr(row[name]) for name in self.rows[0]) for row in self.rows]
        write_whole(self.path, "\n".join(lines) + "\n")

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of the rows."""
        return [row["step"] for row in self.rows], [row[name] for row in self.rows]

    def names(self, prefix: str) -> list[str]:
        return [name for name in (self.rows[0] if self.rows else {}) if name.startswith(prefix)]


def _plot_accuracy(axes, train: Curves, evaluation: Curves) -> None:
    """One colour per depth: lines in training, dots held out."""
    names = train.names("accuracy")
    colours = plotting.matplotlib().colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    for name, colour in zip(names, colours, strict=True):
        label = name.replace("accuracy_", "depth ")
        axes.plot(*train.column(name), color=colour, linewidth=1.2, label=label)
        if name in evaluation.names("accuracy"):
            axes.plot(*evaluation.column(name), "o", color=colour, markersize=3)
    axes.set(xlabel="step", ylabel="top choice is right", ylim=(0, None))
    if len(names) > 1:
        axes.legend(fontsize="small", ncols=2, title="lines: training, dots: held out")


def plot(train: Curves, evaluation: Curves, path: Path) -> None:
    """Loss, accuracy per depth and, for heads, the simulated acceptance length, as a PNG.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    lengths = evaluation.names("acceptance_length")
    panels = 1 + bool(train.names("accuracy")) + bool(lengths)
    figure, (loss, *others) = plotting.figure_with_panels(panels)
    for curves, style, label in ((train, "-", "training"), (evaluation, "o", "held out")):
        if curves.rows:
            loss.plot(*curves.column("loss"), style, markersize=4, label=label)
    drawn = [value for line in loss.get_lines() for value in line.get_ydata()]
    is_positive = any(value > 0 for value in drawn)
    loss.set(xlabel="step", ylabel="loss", yscale="log" if is_positive else "linear")
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter("{x:g}")
    loss.tick_params(axis="y", which="minor", labelsize="small")
    loss.legend()
    if train.names("accuracy"):
        _plot_accuracy(others[0], train, evaluation)
    if lengths:
        others[-1].plot(*evaluation.column("acceptance_length"), "o-", markersize=4)
        others[-1].set(xlabel="step", ylabel="tokens per round, held-out greedy texts")
    for axes in (loss, *others):
        axes.grid(alpha=0.3)
    partial = path.with_suffix(".tmp")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
