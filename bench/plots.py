"""Plots of stored rows, as PNG files. Each file holds a digest of the rows that it shows.

Bytes of a PNG differ between versions of matplotlib. The digest does not, so a test can tell a plot of
older rows from one of the stored rows.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path

from bench import head_tables, headline, labels, load_page, served_page
from peagle_jax.cli.plotting import figure_with_panels

_COLOURS = {"none": "black", "eagle3": "tab:blue", "peagle": "tab:orange"}
_LOAD_COLOUR = "tab:green"
_ROWS = "Rows"
"""Key of the digest in the text of a PNG."""


def of_kind(kind: str) -> Callable[[list[dict]], list[dict]]:
    return lambda rows: [row for row in rows if row["kind"] == kind]


def _beside(rows: list[dict]) -> list[dict]:
    return [row for pair in headline.pairs(rows) for row in pair]


def shown(rows: list[dict]) -> dict[str, list[dict]]:
    """Name of each plot -> the rows that it shows, for plots that have rows."""
    chosen_by_plot = {name: rows_of(rows) for name, (rows_of, _) in PLOTS.items()}
    return {name: chosen for name, chosen in chosen_by_plot.items() if chosen}


def digest(chosen: list[dict]) -> str:
    """Digest of the rows of one plot."""
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(path: Path) -> str | None:
    """Digest of the rows that a PNG of `draw` shows; None where it has none.

    The format: RFC 2083, section 3.2 (chunks) and 4.2.3 (tEXt).
    """
    data = path.read_bytes()
    place = 8  # after the signature
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        if kind == b"tEXt" and body.startswith(_ROWS.encode() + b"\0"):
            return body.partition(b"\0")[2].decode("latin-1")
        place += 12 + length
    return None


def draw(rows: list[dict], folder: Path) -> list[str]:
    """Draws each plot that has rows; returns the names of its files.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    written = []
    for name, chosen in shown(rows).items():
        path = folder / f"{name}.png"
        PLOTS[name][1](chosen, path)
        written.append(str(path))
    return written


def plot_throughput(
    chosen: list[dict],
    path: Path,
    speed: Callable[[dict], float] = itemgetter("tokens_per_second"),
    what: str = "output tokens/s",
    **size: float,
) -> None:
    """Tokens per second over concurrency, a panel per setting: the largest K of each method in full
    colour, the others pale.

    Args:
      speed: tokens per second of a row.
      what: its label.
      size: of a panel, as in `figure_with_panels`.
    """
    groups = labels.settings(chosen)
    figure, panels = figure_with_panels(len(groups), **size)
    for panel, (setting, group) in zip(panels, groups, strict=True):
        for label in dict.fromkeys(map(labels.label, group)):
            line = [row for row in group if labels.label(row) == label]
            method, k = line[0]["method"], line[0]["num_speculative_tokens"]
            largest = max(row["num_speculative_tokens"] for row in group if row["method"] == method)
            panel.plot(
                [row["concurrency"] for row in line],
                [speed(row) for row in line],
                "--" if method == "none" else "o-",
                color=_LOAD_COLOUR if line[0].get("adaptive") == "load" else _COLOURS[method],
                alpha=1.0 if k == largest else 0.15 + 0.3 * k / largest,
                linewidth=2.2 if k == largest else 1.2,
                label=label,
                markersize=4,
            )
        _concurrencies(panel, group)
        title = f"{_panel_title(setting)}\ncommit {labels.listed(group, 'sha')}"
        panel.set(title=title, ylabel=what)
    _save(figure, panels, path, chosen)


def plot_shape(chosen: list[dict], path: Path) -> None:
    """Tokens per second of a full batch, a panel per concurrency and a bar per method and K."""
    names = list(dict.fromkeys(map(labels.label, chosen)))
    across = sorted({row["concurrency"] for row in chosen})
    figure, panels = figure_with_panels(len(across), width=3.2, height=3.4)
    for panel, concurrency in zip(panels, across, strict=True):
        by_name = {labels.label(row): row for row in chosen if row["concurrency"] == concurrency}
        for place, name in enumerate(names):
            if name not in by_name:
                panel.text(place, 0, "no row", ha="center", va="bottom", fontsize=8, color="gray")
                continue
            colour = _COLOURS[by_name[name]["method"]]
            bars = panel.bar(place, by_name[name]["decode_tokens_per_second"], color=colour)
            panel.bar_label(bars, fmt="{:,.0f}", fontsize=9)
        panel.set_xticks(range(len(names)), names, fontsize=8)
        panel.set_title(f"concurrency {concurrency}")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.margins(y=0.12)
    panels[0].set_ylabel("output tokens/s, full batch")
    device, model, *numbers, temperature = labels.settings(chosen)[0][0]
    figure.suptitle(
        f"{model} on one {device}: random weights, synthetic AL {headline.SYNTHETIC}, temperature "
        f"{temperature:g}\n{labels.number_formats(*numbers)}, commit {labels.listed(chosen, 'sha')}",
        fontsize=9,
    )
    _save(figure, panels, path, chosen)


def plot_served(chosen: list[dict], path: Path) -> None:
    """Tokens per second over concurrency: of the bare engine, and by each protocol."""
    figure, panels = figure_with_panels(1)
    for name, points in served_page.lines_of(chosen).items():
        style = "--" if name == "bare engine" else "o-"
        panels[0].plot(*zip(*points, strict=True), style, label=name, markersize=4)
    _concurrencies(panels[0], chosen)
    title = f"{_panel_title(labels.settings(chosen)[0][0])}\ncommit {labels.listed(chosen, 'sha')}"
    panels[0].set(title=title, ylabel="output tokens/s")
    _save(figure, panels, path, chosen)


def plot_rounds(chosen: list[dict], path: Path) -> None:
    """Milliseconds of a round beside another engine's, a panel per method.

    Args:
      chosen: rows of `headline.pairs`, of this and of the other engine in turn.
    """
    pairs = list(zip(chosen[::2], chosen[1::2], strict=True))
    names = list(dict.fromkeys(labels.label(theirs) for _, theirs in pairs))
    figure, panels = figure_with_panels(len(names))
    for panel, name in zip(panels, names, strict=True):
        group = [pair for pair in pairs if labels.label(pair[1]) == name]
        for place, (label, colour) in enumerate(
            (("peagle-jax", "tab:orange"), (group[0][1]["engine"], "tab:gray"))
        ):
            values = [pair[place]["ms_per_round"] for pair in group]
            centres = [number + 0.4 * place for number in range(len(group))]
            bars = panel.bar(centres, values, width=0.38, color=colour, label=label)
            panel.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8)
        ticks = [str(theirs["concurrency"]) for _, theirs in group]
        panel.set_xticks([number + 0.2 for number in range(len(group))], ticks)
        commits = labels.listed([pair[0] for pair in group], "sha")
        title = f"{name}: {headline.SHAPE}\n{group[0][0]['device']}, commit {commits}"
        panel.set(title=title, xlabel="concurrency", ylabel="ms per round")
    _save(figure, panels, path, chosen)


def plot_acceptance(chosen: list[dict], path: Path) -> None:
    """Acceptance by position at the largest K, a panel per setting and prompt set."""
    groups = []
    for setting, group in labels.settings(chosen):
        for name in dict.fromkeys(row["set"] for row in group):
            groups.append((setting, name, [row for row in group if row["set"] == name]))
    figure, panels = figure_with_panels(len(groups))
    for panel, (setting, name, group) in zip(panels, groups, strict=True):
        largest = max(row["num_speculative_tokens"] for row in group)
        for row in group:
            if row["num_speculative_tokens"] != largest:
                continue
            rates = row["acceptance_per_position"]
            label = f"{labels.label(row)}, AL {row['acceptance_length']:.2f}"
            colour = _COLOURS[row["method"]]
            panel.plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=label)
        panel.set(title=f"{name}: {_panel_title(setting)}", xlabel="draft position")
        panel.set(ylabel="accepted", ylim=(0, 1))
    _save(figure, panels, path, chosen)


def plot_train_step(chosen: list[dict], path: Path) -> None:
    """Milliseconds and memory of a training step over the length of a text, a line per form."""
    figure, panels = figure_with_panels(2)
    kinds = (("ms_per_step", "ms per step"), ("memory_gib", "GiB, by XLA's account"))
    for panel, (key, name) in zip(panels, kinds, strict=True):
        for form, form_name in head_tables.FORM_NAMES.items():
            line = sorted(
                (row for row in chosen if row["form"] == form and row[key] is not None),
                key=lambda row: row["tokens"],
            )
            lengths, values = [row["tokens"] for row in line], [row[key] for row in line]
            panel.plot(lengths, values, "o-", label=form_name if line else None, markersize=4)
        panel.set_xscale("log", base=2)
        shapes = sorted({(row["tokens"], row["texts"]) for row in chosen})
        ticks = {tokens: f"{texts} x {tokens:,}" for tokens, texts in shapes}
        panel.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
        panel.set(xlabel="texts x tokens of a step", ylim=(0, None))
        panel.set_title(
            f"{name}\n{labels.listed(chosen, 'device')}, commit {labels.listed(chosen, 'sha')}"
        )
    _save(figure, panels, path, chosen)


def _longest_cells(rows: list[dict]) -> list[dict]:
    """The ablation rows with the most steps: one series, on the same texts and at one K."""
    cells = of_kind("ablation")(rows)
    series = lambda row: (row["steps"], head_tables.drafts_of(row))
    longest = max(map(series, cells), default=None)
    return [row for row in cells if series(row) == longest]


def plot_ablations(chosen: list[dict], path: Path) -> None:
    """AL and fresh AL of every cell, a panel per prompt set."""
    ordered = sorted(chosen, key=lambda row: (_trained(row), row["cell"]), reverse=True)
    sets = sorted({name for row in chosen for name in row["sets"]})
    figure, panels = figure_with_panels(len(sets), width=6.4, height=0.3 * len(ordered) + 1.2)
    names = [row["cell"] for row in ordered]
    colours = [_COLOURS[_trained(row)] for row in ordered]
    for panel, name in zip(panels, sets, strict=True):
        lengths = [row["sets"][name] for row in ordered]
        for label, key, marker in (
            ("AL", "acceptance_length", "o"),
            ("fresh AL", "fresh_acceptance_length", "d"),
        ):
            panel.scatter([al[key] for al in lengths], names, c=colours, marker=marker, label=label)
        panel.tick_params(axis="y", labelsize=8)
        panel.set(xlabel="tokens per round")
        panel.set_title(
            f"{name}, {chosen[0]['steps']:,} steps\n{labels.listed(chosen, 'device')}, "
            f"commit {labels.listed(chosen, 'sha')}"
        )
    _save(figure, panels, path, chosen)


def _trained(row: dict) -> str:
    """Method of an ablation's head."""
    return "eagle3" if "--method eagle3" in row["options"] else "peagle"


PLOTS: dict[str, tuple[Callable[[list[dict]], list[dict]], Callable[[list[dict], Path], None]]] = {
    "throughput": (of_kind("throughput"), plot_throughput),
    "adaptive": (of_kind("adaptive"), plot_throughput),
    "load": (
        of_kind("adaptive-step"),
        partial(
            plot_throughput,
            speed=load_page.speed,
            what="output tokens/s, full batch",
            width=7.5,
        ),
    ),
    "acceptance": (of_kind("acceptance"), plot_acceptance),
    "shape": (headline.shape_rows, plot_shape),
    "served": (served_page.speed_rows, plot_served),
    "rounds": (_beside, plot_rounds),
    "train_step": (of_kind("train-step"), plot_train_step),
    "ablations": (_longest_cells, plot_ablations),
}
"""Plot -> (which rows it shows, what draws them)."""


def _panel_title(setting: tuple) -> str:
    device, model, *numbers, temperature = setting
    return f"{device}\n{model}, {labels.number_formats(*numbers)}, temperature {temperature:g}"


def _concurrencies(panel, chosen: list[dict]) -> None:
    panel.set_xscale("log", base=2)
    ticks = sorted({row["concurrency"] for row in chosen})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xlabel("concurrency")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_ylim(bottom=0)


def _save(figure, panels, path: Path, chosen: list[dict]) -> None:
    for panel in panels:
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the software's version in it, equal rows give an equal file.
    figure.savefig(path, dpi=120, metadata={"Software": None, _ROWS: digest(chosen)})
