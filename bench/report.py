"""`peagle-bench report`: plots, and tables between markers in the README or docs/, from stored rows.

    <!-- bench:throughput -->
    ... replaced ...
    <!-- /bench:throughput -->

Of several rows of the same measurement, the newest is shown.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import rows, tried
from peagle_jax.config import ConfigError
from peagle_jax.runs import METHOD_NAMES

_SETTING = ("device", "model", "dtype", "weights", "kv_cache_dtype", "temperature")
_KEY = (
    "kind", *_SETTING, "set", "method", "num_speculative_tokens", "synthetic_acceptance_length",
    "concurrency",
)  # fmt: skip
_KINDS = ("acceptance", "throughput", "decode-step", "lossless")
"""Conversions and cold starts, too, are rows; what was found stands in docs/."""
_METHOD_ORDER = list(METHOD_NAMES)
_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def newest(all_rows: Sequence[dict]) -> list[dict]:
    """The last row of each measurement, in order of method, K and concurrency; then those of kernels;
    then what was tried."""
    latest: dict[tuple, dict] = {}
    kernels: dict[tuple, dict] = {}
    for row in sorted(all_rows, key=lambda row: row.get("date", "")):
        if row["kind"] == "kernel" and row["config"] is None:  # not of a comparison of configs
            kernels[row["device"], row["op"], row["spec"]] = row
        if row["kind"] not in _KINDS:
            continue
        row = {"weights": row["dtype"], "kv_cache_dtype": "auto"} | row  # the first rows do not say
        # Concurrency changes no acceptance: a repeat with another one replaces the row.
        latest[tuple(row.get(k) for k in _KEY[: -1 if row["kind"] == "acceptance" else None])] = row
    order = lambda row: (
        _METHOD_ORDER.index(row["method"]), row["num_speculative_tokens"], row["concurrency"],
    )  # fmt: skip
    return sorted(latest.values(), key=order) + list(kernels.values()) + tried.newest(all_rows)


def _settings(some: list[dict]) -> list[tuple[tuple, list[dict]]]:
    """Rows by device, model, formats and temperature, first seen first."""
    groups: dict[tuple, list[dict]] = {}
    for row in some:
        groups.setdefault(tuple(row[key] for key in _SETTING), []).append(row)
    return list(groups.items())


def _label(row: dict) -> str:
    name = METHOD_NAMES[row["method"]]
    return name if row["method"] == "none" else f"{name} K={row['num_speculative_tokens']}"


def _numbers(dtype: str, weights: str, cache: str) -> str:
    others = [] if weights == dtype else [f"{weights} weights"]
    others += [] if cache == "auto" else [f"{cache} KV cache"]
    return f"{dtype} with {' and '.join(others)}" if others else dtype


def _title(setting: tuple, some: list[dict]) -> str:
    device, model, *numbers, temperature = setting
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}"
    return (
        f"**{device}**, model {model}, {_numbers(*numbers)}, {sampling}, "
        f"{_listed(some, 'max_tokens')} new tokens; {_provenance(some)}"
    )


def _listed(some: list[dict], name: str) -> str:
    by_date = sorted(some, key=lambda row: row["date"])
    return " and ".join(dict.fromkeys(str(row[name]) for row in by_date))


def _provenance(some: list[dict]) -> str:
    day = max(row["date"] for row in some)[:10]
    return f"jax {_listed(some, 'jax')}, commit {_listed(some, 'sha')}, {day}"


def _markdown(header: list[str], lines: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, aligned, *lines))


def acceptance_table(some: list[dict]) -> str:
    """One line per prompt set, method and K; a column per position."""
    width = max(len(row["acceptance_per_position"]) for row in some)
    header = ["prompts", "method", "K", "AL", *map(str, range(1, width + 1))]
    names = list(dict.fromkeys(row["set"] for row in some))
    lines = []
    for row in sorted(some, key=lambda row: names.index(row["set"])):
        rates = [f"{rate:.2f}" for rate in row["acceptance_per_position"]]
        lines.append(
            [
                f"{row['set']} ({row['prompts']})",
                METHOD_NAMES[row["method"]],
                str(row["num_speculative_tokens"]),
                f"{row['acceptance_length']:.2f}",
                *rates,
                *[""] * (width - len(rates)),
            ]
        )
    return _markdown(header, lines)


def _grid(some: list[dict], cell: Callable[[dict], str]) -> str:
    """Methods down, concurrencies across."""
    across = sorted({row["concurrency"] for row in some})
    cells = {(_label(row), row["concurrency"]): cell(row) for row in some}
    labels = list(dict.fromkeys(_label(row) for row in some))
    lines = [[label, *(cells.get((label, c), "") for c in across)] for label in labels]
    return _markdown(["concurrency", *map(str, across)], lines)


def decode_step_table(some: list[dict]) -> str:
    """One line per method, K and concurrency: a round, its floor, and what it makes of tokens."""
    header = [
        "method", "concurrency", "ms per round", "floor, ms", "of the floor", "AL", "tokens/s",
        "time to first token, ms",
    ]  # fmt: skip
    lines = [
        [
            _label(row),
            str(row["concurrency"]),
            f"{row['ms_per_round']:.2f}",
            "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
            "" if row["floor_ms"] is None else f"{100 * row['fraction_of_floor']:.0f} %",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ttft_ms_median']:.0f}",
        ]
        for row in some
    ]
    return _markdown(header, lines)


def lossless_table(some: list[dict]) -> str:
    """Tokens that differ of those compared, and AL; methods down, concurrencies across, a sum below."""
    total = lambda name: sum(row[name] for row in some)
    cell = lambda row: (
        f"{row['tokens_differing']:,} of {row['tokens_compared']:,} (AL {row['acceptance_length']:.2f})"
    )
    beside = max(row["reference_concurrency"] for row in some)
    return (
        f"{_grid(some, cell)}\n\nBeside plain decoding at concurrency {beside}: "
        f"{total('tokens_differing'):,} of {total('tokens_compared'):,} tokens differ."
    )


def kernel_table(some: list[dict]) -> str:
    """One line per kernel and spec, a part per device."""
    header = ["kernel", "spec", "us", "TB/s", "of the bandwidth", "XLA, us", "times faster"]
    parts = []
    for device in dict.fromkeys(row["device"] for row in some):
        own = [row for row in some if row["device"] == device]
        lines = [
            [
                row["op"],
                row["spec"],
                f"{row['us']:.1f}",
                f"{row['bytes_per_second'] / 1e12:.2f}",
                _or_nothing(row["fraction_of_bandwidth"], lambda share: f"{100 * share:.0f} %"),
                _or_nothing(row["reference_us"], lambda us: f"{us:.1f}"),
                _or_nothing(row["speedup"], lambda ratio: f"{ratio:.1f}"),
            ]
            for row in sorted(own, key=lambda row: row["op"])
        ]
        parts.append(f"**{device}**; {_provenance(own)}\n\n{_markdown(header, lines)}\n")
    return "\n".join(parts)


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _speed(row: dict) -> str:
    ratio = row.get("ratio_to_plain")
    speed = f"{row['tokens_per_second']:,.0f}"
    return speed if ratio is None or row["method"] == "none" else f"{speed} ({ratio:.2f}x)"


def _by_setting(draw: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """A part per device, model, formats and temperature, each with a title."""
    part = lambda setting, own: f"{_title(setting, own)}\n\n{draw(own)}\n"
    return lambda some: "\n".join(part(setting, own) for setting, own in _settings(some))


def _grids(cell: Callable[[dict], str]) -> Callable[[list[dict]], str]:
    return _by_setting(lambda some: _grid(some, cell))


TABLES: dict[str, tuple[str | tuple[str, ...], Callable[[list[dict]], str]]] = {
    "acceptance": ("acceptance", _by_setting(acceptance_table)),
    "throughput": ("throughput", _grids(_speed)),
    "rounds": ("throughput", _grids(lambda row: f"{row['ms_per_round']:.2f}")),
    "decode-step": ("decode-step", _by_setting(decode_step_table)),
    "lossless": ("lossless", _by_setting(lossless_table)),
    "ttft": ("throughput", _grids(lambda row: f"{row['ttft_ms_median']:.0f}")),
    "kernels": ("kernel", kernel_table),
    "tried": (tried.KINDS, lambda some: tried.tried_table(some, _markdown)),
    "hostile": ("hostile", lambda some: tried.hostile_table(some, _markdown)),
}
"""Table name -> (kind or kinds of rows, what they look like)."""


def render(name: str, some: list[dict]) -> str:
    """Markdown of one named table.

    Raises:
      ConfigError: no such table, or no rows for it.
    """
    if name not in TABLES:
        raise ConfigError(f"unknown table bench:{name}; known are {', '.join(TABLES)}")
    kinds, draw = TABLES[name]
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    chosen = [row for row in some if row["kind"] in kinds]
    if not chosen:
        raise ConfigError(f"bench:{name} needs {' or '.join(kinds)} rows and there are none")
    return draw(chosen)


def update_markdown(text: str, some: list[dict]) -> str:
    """`text` with every marked block drawn again."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{render(m[2], some)}\n{m[3]}", text)


def plot_throughput(some: list[dict], path: Path) -> None:
    """Tokens per second over concurrency, a panel per setting."""
    groups = _settings([row for row in some if row["kind"] == "throughput"])
    figure, panels = _panels(len(groups))
    for panel, (setting, own) in zip(panels, groups, strict=True):
        for label in dict.fromkeys(map(_label, own)):
            line = [row for row in own if _label(row) == label]
            style = "k--" if line[0]["method"] == "none" else "o-"
            panel.plot(
                [row["concurrency"] for row in line],
                [row["tokens_per_second"] for row in line],
                style,
                label=label,
                markersize=4,
            )
        panel.set_xscale("log", base=2)
        ticks = sorted({row["concurrency"] for row in own})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set(title=_panel_title(setting), xlabel="concurrency", ylabel="output tokens/s")
        panel.set_ylim(bottom=0)
    _save(figure, panels, path)


def plot_acceptance(some: list[dict], path: Path) -> None:
    """Acceptance by position at the largest K, a panel per setting and prompt set."""
    groups = []
    for setting, own in _settings([row for row in some if row["kind"] == "acceptance"]):
        for name in dict.fromkeys(row["set"] for row in own):
            groups.append((setting, name, [row for row in own if row["set"] == name]))
    figure, panels = _panels(len(groups))
    for panel, (setting, name, own) in zip(panels, groups, strict=True):
        largest = max(row["num_speculative_tokens"] for row in own)
        for row in own:
            if row["num_speculative_tokens"] != largest:
                continue
            rates = row["acceptance_per_position"]
            label = f"{_label(row)}, AL {row['acceptance_length']:.2f}"
            panel.plot(range(1, len(rates) + 1), rates, "o-", label=label, markersize=4)
        panel.set(title=f"{name}: {_panel_title(setting)}", xlabel="draft position")
        panel.set(ylabel="accepted", ylim=(0, 1))
    _save(figure, panels, path)


def _panel_title(setting: tuple) -> str:
    device, model, *numbers, temperature = setting
    return f"{device}\n{model}, {_numbers(*numbers)}, temperature {temperature:g}"


def _panels(count: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, count, figsize=(5 * count, 4), squeeze=False, layout="constrained"
    )
    return figure, list(panels[0])


def _save(figure, panels, path: Path) -> None:
    import matplotlib.pyplot as plt

    for panel in panels:
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the software's version in it, equal rows give an equal file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def report(results: Path, readme: Path | None, plots: Path) -> list[str]:
    """Writes all tables and plots that have rows. Returns the names of what was written.

    Raises:
      ConfigError: no rows, or the README's markers ask for what does not exist.
    """
    some = newest(rows.read(sorted(results.glob("*.jsonl"))))
    if not some:
        raise ConfigError(f"{results}: holds no rows; run peagle-bench acceptance or throughput")
    written = []
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        if not _MARKED.search(text):
            raise ConfigError(f"{readme}: no <!-- bench:NAME --> ... <!-- /bench:NAME --> markers")
        readme.write_text(update_markdown(text, some), encoding="utf-8")
        written.append(str(readme))
    for kind, draw in (("throughput", plot_throughput), ("acceptance", plot_acceptance)):
        if any(row["kind"] == kind for row in some):
            draw(some, plots / f"{kind}.png")
            written.append(str(plots / f"{kind}.png"))
    return written
