"""`peagle-bench report`: plots, and tables between markers in the README or docs/, from stored rows.

    <!-- bench:throughput -->
    ... replaced ...
    <!-- /bench:throughput -->

Of several rows of the same measurement, the newest is shown.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import (
    filtered_page,
    head_tables,
    headline,
    host_page,
    labels,
    ladder_page,
    load_page,
    parallel_page,
    plots,
    prefix_page,
    replicas,
    rows,
    served_page,
    structured_page,
    tried,
)
from peagle_jax.cli.runs import METHOD_NAMES
from peagle_jax.config import ConfigError

_KEY = (
    "kind", *labels.SETTING, "set", "method", "num_speculative_tokens", "synthetic_acceptance_length",
    "synthetic_acceptance_rows", "synthetic_acceptance_set", "adaptive", "concurrency",
)  # fmt: skip
PAGES = tuple(
    rows.RESULTS.parents[1] / name
    for name in (
        "README.md",
        "docs/results.md",
        "docs/decode-step.md",
        "docs/host.md",
        "docs/ladder.md",
        "docs/parallel.md",
    )
)
"""Pages of this repository that have tables; all are drawn by one call of `peagle-bench report`."""
_KINDS = ("acceptance", "throughput", "decode-step", "lossless", "adaptive", "adaptive-step")
"""Kinds that `newest` orders by method. Rows of cold starts have no table."""
_RUN = ("device", "model", "dtype", "method", "num_speculative_tokens", "concurrency")
_KEYS = {
    "headroom": ("model", "set", "method", "num_speculative_tokens"),
    "reference": ("engine", "model", "method", "num_speculative_tokens", "concurrency"),
    "ablation": ("cell", "steps", "seed", "batch", "learning_rate", "texts"),
    "trained-head": ("method", "part"),
    "train-step": ("device", "form", "texts", "tokens", "options"),
    "prompt-ends": ("model", "set", "method", "end", "healed"),
    "humaneval": ("model", "temperature", "samples"),
    "conversion": ("model", "weights", "layers"),
    "prefix-cache": (*_RUN, "chat_tokens", "page_size"),
    "host-round": (*_RUN, "rounds_per_call", "program", "sha"),
    "methods": _RUN,
    "structured": ("device", "model", "method", "num_draft", "concurrency", "mode"),
    "structured-ends": (
        "device",
        "model",
        "method",
        "num_draft",
        "schema",
        "temperature",
        "spaces",
    ),
    "masks": ("device", "vocab_size", "strings", "num_draft", "threads", "concurrency"),
    "lossless-warm": (*_RUN, "layers"),
    "filtered-step": filtered_page.KEY,
    "repeated-step": (*_RUN, "tensor_parallel", "rounds_per_call"),
    "served": served_page.KEY,
    **parallel_page.KEYS,
}
"""Fields that identify a measurement of the other kinds."""
_METHOD_ORDER = list(METHOD_NAMES)
_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def newest(all_rows: Sequence[dict]) -> list[dict]:
    """The last row of each measurement, by method, K and concurrency; then rows of kernels, of the kinds of
    `_KEYS`, of randomised tests and attacks."""
    latest: dict[tuple, dict] = {}
    kernels: dict[tuple, dict] = {}
    others: dict[tuple, dict] = {}
    for row in sorted(all_rows, key=lambda row: row.get("date", "")):
        if row["kind"] == "kernel" and row["config"] is None:  # not of a comparison of configs
            kernels[row["device"], row["op"], row["spec"]] = row
        if row["kind"] in _KEYS:
            drafts = head_tables.drafts_of(row) if row["kind"] == "ablation" else None
            others[row["kind"], drafts, *(row.get(name) for name in _KEYS[row["kind"]])] = row
        if row["kind"] not in _KINDS:
            continue
        # The first rows do not say these.
        row = {"weights": row["dtype"], "kv_cache_dtype": "auto", "activations": "bf16"} | row
        # Concurrency changes no acceptance: a repeat with another one replaces the row.
        fields = _KEY[: -1 if row["kind"] == "acceptance" else None]
        length = labels.prompt_length(row) if row["kind"] == "decode-step" else None
        latest[length, *(row.get(k) for k in fields)] = row
    order = lambda row: (
        _METHOD_ORDER.index(row["method"]), row["num_speculative_tokens"], row["concurrency"],
    )  # fmt: skip
    found = sorted(latest.values(), key=order)
    others = [*others.values(), *tried.newest(all_rows), *ladder_page.newest(all_rows)]
    return [*found, *kernels.values(), *others]


def acceptance_table(measured: list[dict]) -> str:
    """One line per prompt set, method and K; a column per position."""
    width = max(len(row["acceptance_per_position"]) for row in measured)
    header = ["prompts", "method", "K", "AL", *map(str, range(1, width + 1))]
    names = list(dict.fromkeys(row["set"] for row in measured))
    lines = []
    for row in sorted(measured, key=lambda row: names.index(row["set"])):
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
    return labels.markdown(header, lines)


def _grid(measured: list[dict], cell: Callable[[dict], str]) -> str:
    """Methods down, concurrencies across."""
    across = sorted({row["concurrency"] for row in measured})
    cells = {(labels.label(row), row["concurrency"]): cell(row) for row in measured}
    down = list(dict.fromkeys(labels.label(row) for row in measured))
    lines = [[label, *(cells.get((label, c), "") for c in across)] for label in down]
    return labels.markdown(["concurrency", *map(str, across)], lines)


def decode_step_table(measured: list[dict]) -> str:
    """One line per method, K and concurrency: a round, its floor, and what it makes of tokens."""
    header = [
        "method", "prompt", "concurrency", "synthetic AL", "ms per round", "floor, ms", "of the floor", "AL", "tokens/s",
        "time to first token, ms",
    ]  # fmt: skip
    lines = [
        [
            labels.label(row),
            f"{labels.prompt_length(row):,}",
            str(row["concurrency"]),
            _or_nothing(row["synthetic_acceptance_length"], str),
            f"{row['ms_per_round']:.2f}",
            "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}",
            "" if row["floor_ms"] is None else f"{100 * row['fraction_of_floor']:.0f} %",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ttft_ms_median']:.0f}",
        ]
        for row in measured
    ]
    return labels.markdown(header, lines)


def lossless_table(measured: list[dict]) -> str:
    """Tokens that differ of those compared, and AL; methods down, concurrencies across, a sum below."""
    total = lambda name: sum(row[name] for row in measured)
    cell = lambda row: (
        f"{row['tokens_differing']:,} of {row['tokens_compared']:,} (AL {row['acceptance_length']:.2f})"
    )
    beside = max(row["reference_concurrency"] for row in measured)
    return (
        f"{_grid(measured, cell)}\n\nBeside plain decoding at concurrency {beside}: "
        f"{total('tokens_differing'):,} of {total('tokens_compared'):,} tokens differ."
    )


def kernel_table(measured: list[dict]) -> str:
    """One line per kernel and spec, a part per device."""
    header = ["kernel", "spec", "us", "TB/s", "of the bandwidth", "XLA, us", "times faster"]
    parts = []
    for device in dict.fromkeys(row["device"] for row in measured):
        group = [row for row in measured if row["device"] == device]
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
            for row in sorted(group, key=lambda row: row["op"])
        ]
        parts.append(
            f"**{device}**; {labels.provenance(group)}\n\n{labels.markdown(header, lines)}\n"
        )
    return "\n".join(parts)


def conversion_table(measured: list[dict]) -> str:
    """One line per checkpoint: speed of a conversion beside a plain copy, and peak memory."""
    header = [
        "checkpoint",
        "GB",
        "convert, s",
        "GB/s",
        "copy, GB/s",
        "of the copy's speed",
        "peak, GB",
    ]
    lines = [
        [
            f"{row['model']}, first {row['layers']} layers, {row['weights']}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{row['copy_gigabytes_per_second']:.2f}",
            f"{100 * row['ratio_to_copy']:.0f} %",
            f"{row['peak_memory_gigabytes']:.2f}",
        ]
        for row in measured
    ]
    title = f"**{labels.listed(measured, 'device')}**; {labels.provenance(measured)}"
    return f"{title}\n\n{labels.markdown(header, lines)}"


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _speed(row: dict) -> str:
    ratio = row.get("ratio_to_plain")
    speed = f"{row['tokens_per_second']:,.0f}"
    return speed if ratio is None or row["method"] == "none" else f"{speed} ({ratio:.2f}x)"


def _spread(row: dict) -> str:
    """Slowest and fastest run, where a cell was run more than once."""
    speeds = row.get("tokens_per_second_of_repeats")
    return f"; {min(speeds):,.0f} to {max(speeds):,.0f}" if speeds else ""


def _by_setting(draw: Callable[[list[dict]], str]) -> Callable[[list[dict]], str]:
    """A part per device, model, formats and temperature, each with a title."""
    part = lambda setting, group: f"{labels.title(setting, group)}\n\n{draw(group)}\n"
    return lambda measured: "\n".join(
        part(setting, group) for setting, group in labels.settings(measured)
    )


def _grids(cell: Callable[[dict], str]) -> Callable[[list[dict]], str]:
    return _by_setting(lambda measured: _grid(measured, cell))


TABLES: dict[str, tuple[str | tuple[str, ...], Callable[[list[dict]], str]]] = {
    "acceptance": ("acceptance", _by_setting(acceptance_table)),
    "throughput": ("throughput", _grids(_speed)),
    "adaptive": ("adaptive", _grids(lambda row: _speed(row) + _spread(row))),
    "load": ("adaptive-step", _by_setting(load_page.page(_grid))),
    "rounds": ("throughput", _grids(lambda row: f"{row['ms_per_round']:.2f}")),
    "decode-step": ("decode-step", _by_setting(decode_step_table)),
    "lossless": ("lossless", _by_setting(lossless_table)),
    "ttft": ("throughput", _grids(lambda row: f"{row['ttft_ms_median']:.0f}")),
    "kernels": ("kernel", kernel_table),
    "tried": (tried.KINDS, lambda measured: tried.tried_table(measured, labels.markdown)),
    "headline": (("acceptance", "headroom"), headline.tokens_per_round),
    "heads": ("headroom", head_tables.heads_table),
    "ablations": ("ablation", head_tables.ablations_table),
    "trained-heads": ("trained-head", head_tables.trained_heads_table),
    "train-step": ("train-step", head_tables.train_step_table),
    "prompt-ends": ("prompt-ends", head_tables.prompt_ends_table),
    "humaneval": ("humaneval", head_tables.humaneval_table),
    "conversion": ("conversion", conversion_table),
    "shape": ("decode-step", headline.shape_caption),
    "beside": (("decode-step", "reference"), headline.beside_table),
    "reference": ("reference", headline.reference_table),
    "lossless-sum": ("lossless", headline.lossless_sum),
    "ladder": ("ladder", ladder_page.table),
    "prefix": ("prefix-cache", prefix_page.saved_table),
    "replicas": (replicas.KINDS, replicas.drawn),
    "host": ("host-round", host_page.host_table),
    "methods": ("methods", host_page.methods_table),
    "lossless-warm": ("lossless-warm", prefix_page.equal_table),
    "structured": ("structured", structured_page.rounds_table),
    "structured-ends": ("structured-ends", structured_page.ends_table),
    "masks": ("masks", structured_page.masks_table),
    **parallel_page.TABLES,
    "filtered": ("filtered-step", filtered_page.filtered_table),
    "served": ("served", served_page.served_table),
    "served-speed": (("served", "decode-step", "reference"), served_page.speed_table),
    "served-figure": (("served", "decode-step"), served_page.speed_figure),
    "hostile": ("hostile", lambda measured: tried.hostile_table(measured, labels.markdown)),
}
"""Table name -> (kind or kinds of rows, what they look like)."""


def render(name: str, measured: list[dict]) -> str:
    """Markdown of one named table.

    Raises:
      ConfigError: no such table, or no rows for it.
    """
    if name not in TABLES:
        raise ConfigError(f"unknown table bench:{name}; known are {', '.join(TABLES)}")
    kinds, draw = TABLES[name]
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    chosen = [row for row in measured if row["kind"] in kinds]
    # The ladder shows predictions; served models are left out until there are rows.
    if not chosen and name not in ("ladder", "served"):
        raise ConfigError(f"bench:{name} needs {' or '.join(kinds)} rows and there are none")
    return draw(chosen)


def update_markdown(text: str, measured: list[dict]) -> str:
    """`text` with every marked block drawn again."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{render(m[2], measured)}\n{m[3]}", text)


def marked(page: Path) -> list[str]:
    """Names of the blocks of a page, in its order."""
    return [match[2] for match in _MARKED.finditer(page.read_text(encoding="utf-8"))]


def report(results: Path, pages: Sequence[Path], folder: Path) -> list[str]:
    """Writes the tables of all pages, and all plots that have rows. Returns the names of the files.

    A page is written only if all can be drawn.

    Raises:
      ConfigError: no rows, a page that does not exist or has no markers, or markers without rows.
    """
    measured = newest(rows.read(sorted(results.glob("*.jsonl"))))
    if not measured:
        raise ConfigError(f"{results}: holds no rows; run peagle-bench acceptance or throughput")
    drawn = {page: _drawn(page, measured) for page in pages}
    for page, text in drawn.items():
        page.write_text(text, encoding="utf-8")
    return [*map(str, pages), *plots.draw(measured, folder)]


def _drawn(page: Path, measured: list[dict]) -> str:
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page}: cannot be read ({error.strerror})") from error
    if not _MARKED.search(text):
        raise ConfigError(f"{page}: no <!-- bench:NAME --> ... <!-- /bench:NAME --> markers")
    return update_markdown(text, measured)
