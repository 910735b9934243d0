"""`python -m lab report`: tables between markers in the README or docs/, and a plot, from rows.

    <!-- bench:throughput -->
    ... replaced ...
    <!-- /bench:throughput -->

lab/tables.toml says which rows a table has and how they look.
"""

import hashlib
import json
import re
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.command import RESULTS, Command, Options
from bench.presets import preset
from bench.printed import Fields, cells, named, text_of
from lab.roofline import CHIPS, fraction
from peagle_jax.cli.plotting import figure_with_panels
from peagle_jax.cli.runs import METHOD_NAMES
from peagle_jax.config import ConfigError

_SPEC = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
KINDS: dict[str, list[str]] = _SPEC["kinds"]
TABLES: dict[str, dict[str, Any]] = _SPEC["tables"]
_ROOT = RESULTS.parents[1]
_PAGES = (
    "docs/results.md",
    "docs/decode-step.md",
    "docs/training.md",
    "docs/rollouts.md",
    "docs/drafters.md",
)
PAGES = tuple(_ROOT / name for name in ("README.md", *_PAGES))
"""Pages that have tables."""
PLOTS = {"served.png": "served-speed", "drafters.png": "drafters"}
"""Plots, and the tables whose rows they show."""
_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)
_DIGEST = "Rows"
"""Key of the digest of the shown rows in the text of a PNG: its bytes differ between versions of
matplotlib, the digest does not."""


_DEFAULTS = {
    **{"kv_cache_dtype": "auto", "activations": "bf16", "adaptive": "off", "date": ""},
    "draft_sampling": "argmax",
}
"""Fields that the first rows lack."""
PROTOCOLS = {"grpc": "gRPC", "http": "HTTP"}
_AGGREGATES = {
    "sum": sum,
    "min": min,
    "max": max,
    "median": statistics.median,
    "distinct": lambda values: len(set(values)),
    "all": lambda values: ", ".join(dict.fromkeys(map(str, values))),
}
"""Names of facts about several rows, with the field behind them: sum_tokens."""
_LISTED = 4  # commits in a title, at most


def derived(row: dict) -> dict:
    """A row with what tables say of it in words."""
    row = _DEFAULTS | {"weights": row.get("dtype")} | row
    made: dict[str, Any] = {"day": row["date"][:10], "close": ")"}
    if (method := row.get("method")) in METHOD_NAMES and "num_speculative_tokens" in row:
        k = f"K={row['num_speculative_tokens']}"
        drafts = k if row["adaptive"] == "off" else f"K by {row['adaptive']}"
        name = METHOD_NAMES[method]
        drawn = ", drawn" * (row["draft_sampling"] == "sample")
        drafts += drawn
        made["method_name"] = name + drawn
        made["label"] = name if method == "none" else f"{name} {drafts}"
    if row.get("ratio_to_plain") and method == "none":
        made["ratio_to_plain"] = None
    if "prompts" in row:
        made["prompt_length"] = row["prompt_tokens"] // row["prompts"]
    if "dtype" in row:
        others = [f"{row['weights']} weights"] * (row["weights"] != row["dtype"])
        others += [f"{row['kv_cache_dtype']} KV cache"] * (row["kv_cache_dtype"] != "auto")
        others += [f"{row['activations']} activations"] * (row["activations"] != "bf16")
        made["formats"] = " with ".join([row["dtype"], *filter(None, [" and ".join(others)])])
    if "temperature" in row:
        greedy = row["temperature"] == 0
        made["sampling"] = "greedy" if greedy else f"temperature {row['temperature']:g}"
    for number, rate in enumerate(row.get("acceptance_per_position", ()), 1):
        made[f"position_{number}"] = rate
    if row["kind"] == "served":
        made["protocol_name"] = PROTOCOLS[row["protocol"]]
        made["load"] = _load(row)
        made["memory"] = ", ".join(
            f"{one['role']} {one['resident_mib']:,.0f} MiB" for one in row.get("processes", ())
        )
    if row.get("approximate"):
        made["about"] = "about "
    return row | named(row) | made | _floor(row)


def _floor(row: dict) -> dict:
    """What `roofline.fraction` says of a round of a preset; old rows have it."""
    if row["kind"] != "decode-step" or row["device"] not in CHIPS or "floor_ms" in row:
        return {}
    chosen = preset(row["model"].partition(" ")[0], row["layers"])
    head = None if row["method"] == "none" else chosen.head(row["method"])
    return fraction(row, chosen.target, head)


def _load(row: dict) -> str:
    if row["rate"] is not None:
        return f"{row['rate']:g} requests/s"
    seconds = f", mixed lengths for {row['duration']:g} s" if row.get("duration") else ""
    return f"{row['concurrency']} requests{seconds}"


class Facts(Fields):
    """Fields of the newest of some rows, and facts about all of them, by name: see `_AGGREGATES`;
    `count`, and `provenance`, their versions, commits and day."""

    def __init__(self, some: Sequence[dict]):
        super().__init__(max(some, key=lambda row: row["date"]))
        self._rows = some

    def __missing__(self, name: str) -> Any:
        if name == "count":
            return len(self._rows)
        if name == "provenance":
            many = self["distinct_sha"] > _LISTED
            commits = f"{self['distinct_sha']} commits up to" if many else "commit"
            shown = self["sha"] if many else self["all_sha"]
            return f"jax {self['all_jax']}, {commits} {shown}, {self['day']}"
        aggregate, _, field = name.partition("_")
        by_date = sorted(self._rows, key=lambda row: row["date"])
        values = [row[field] for row in by_date if row.get(field) is not None]
        return _AGGREGATES[aggregate](values) if values and aggregate in _AGGREGATES else None


def run(options: Options) -> int:
    """Writes the tables and the plots. No page is written unless all can be drawn."""
    measured = stored()
    drawn = {page: update_markdown(page.read_text(encoding="utf-8"), measured) for page in PAGES}
    for page, text in drawn.items():
        page.write_text(text, encoding="utf-8")
        print(page)
    for name, table in PLOTS.items():
        plot(chosen_rows(table, measured), RESULTS / name)
    return 0


def stored() -> list[dict]:
    """The newest rows of bench/results."""
    return newest(read(sorted(RESULTS.glob("*.jsonl"))))


def read(paths: Iterable[Path]) -> list[dict]:
    """All rows of some files.

    Raises:
      ConfigError: a line is not JSON, or a file cannot be read.
    """
    rows = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON ({error})") from error
    return rows


def marked(text: str) -> list[str]:
    """Names of the blocks of a page, in its order."""
    return [match[2] for match in _MARKED.finditer(text)]


def update_markdown(text: str, measured: list[dict]) -> str:
    """`text` with every marked block drawn again."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{render(m[2], measured)}\n{m[3]}", text)


def newest(all_rows: Iterable[dict]) -> list[dict]:
    """The last row of each measurement of `KINDS`, with derived fields, by method, K and load."""
    latest: dict[tuple, dict] = {}
    for row in map(derived, all_rows):
        if row["kind"] in KINDS:
            key = row["kind"], *(row.get(name) for name in KINDS[row["kind"]])
            if key not in latest or latest[key]["date"] <= row["date"]:
                latest[key] = row
    methods = [*METHOD_NAMES, None]
    number = lambda row, name: row.get(name) or 0
    order = lambda row: (
        methods.index(row.get("method")),
        *(number(row, name) for name in ("num_speculative_tokens", "concurrency", "rate")),
        row.get("protocol", ""),
    )
    return sorted(latest.values(), key=order)


def chosen_rows(name: str, measured: Sequence[dict]) -> list[dict]:
    """The rows that a table shows."""
    table = TABLES[name]
    value = lambda row, field: "" if row.get(field) is None else row[field]
    has = lambda row, field, values: (
        value(row, field) in (values if isinstance(values, list) else [values])
    )
    return [
        row
        for row in measured
        if row["kind"] == table["kind"]
        and all(has(row, *one) for one in table.get("where", {}).items())
        and not any(has(row, *one) for one in table.get("without", {}).items())
    ]


def render(name: str, measured: list[dict]) -> str:
    """Markdown of one named table.

    Raises:
      ConfigError: no such table, or no rows for it.
    """
    if name not in TABLES:
        raise ConfigError(f"unknown table bench:{name}; known are {', '.join(TABLES)}")
    table, chosen = TABLES[name], chosen_rows(name, measured)
    if not chosen:
        raise ConfigError(f"bench:{name} needs {table['kind']} rows and there are none")
    if table["layout"] == "text":
        return text_of(table["text"], Facts(chosen))
    draw = {"lines": _lines, "grid": _grid}[table["layout"]]
    if "split" not in table:
        return draw(table, chosen)
    parts = _groups(chosen, table["split"])
    return "\n\n".join(f"{_title(table, some)}\n\n{draw(table, some)}" for some in parts)


def _title(table: dict, some: list[dict]) -> str:
    facts = Facts(some)
    device, *others = (facts[field] for field in table["split"])
    if "prompt_length" in table["split"]:
        others[-1] = f"{others[-1]:,} prompt tokens"
    return f"{', '.join([f'**{device}**', *others])}; {facts['provenance']}"


def _groups(some: Sequence[dict], fields: Sequence[str]) -> list[list[dict]]:
    """Rows with equal fields, first seen first."""
    groups: dict[tuple, list[dict]] = {}
    for row in some:
        groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return list(groups.values())


def _lines(table: dict, some: list[dict]) -> str:
    groups = _groups(some, table["by"]) if "by" in table else [[row] for row in some]
    return markdown(*cells(table["columns"], [Facts(group) for group in groups]))


def _grid(table: dict, some: list[dict]) -> str:
    field, order = table.get("across", "concurrency"), table.get("order", ())
    some = sorted(some, key=lambda row: [row[one] for one in order])
    across = sorted({row[field] for row in some})
    cells: dict[str, dict[int, str]] = {}
    for line, text in table["lines"]:
        for row in some:
            facts = Facts([row])
            if found := text_of(text, facts):
                cells.setdefault(text_of(line, facts), {})[row[field]] = found
    header = [table["corner"], *map(str, across)]
    return markdown(
        header, [[line, *(own.get(one, "") for one in across)] for line, own in cells.items()]
    )


def markdown(header: list[str], lines: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, aligned, *lines))


def plot(chosen: list[dict], path: Path) -> None:
    """Draws rows of the kind `served`, or of `acceptance`."""
    draw = {"served": _plot_served, "acceptance": _plot_acceptance}[chosen[0]["kind"]]
    # Without the software's version in it, equal rows give an equal file.
    draw(chosen).savefig(path, dpi=120, metadata={"Software": None, _DIGEST: digest(chosen)})


def _plot_served(chosen: list[dict]) -> Any:
    """Tokens per second over concurrency: of the bare engine, and by each protocol."""
    figure, (panel,) = figure_with_panels(1)
    for name, style, field in (
        ("bare engine", "--", "bare_tokens_per_second"),
        *((protocol, "o-", "tokens_per_second") for protocol in PROTOCOLS),
    ):
        own = [row for row in chosen if field in row and name in ("bare engine", row["protocol"])]
        points = sorted({row["concurrency"]: row[field] for row in own}.items())
        label = f"served by {PROTOCOLS[name]}" if name in PROTOCOLS else name
        if points:
            panel.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    facts, ticks = Facts(chosen), sorted({row["concurrency"] for row in chosen})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set(xlabel="concurrency", ylabel="output tokens/s")
    title = f"{facts['device']}\n{facts['model']}, {facts['formats']}, {facts['sampling']}"
    _finish(panel, f"{title}\ncommit {facts['all_sha']}")
    return figure


def _plot_acceptance(chosen: list[dict]) -> Any:
    """AL over K, a panel for each prompt set with several K, a line for each method; of the device
    that has most rows."""
    chosen = max(_groups(chosen, ["device"]), key=len)
    sets = [
        own
        for own in _groups(chosen, ["set"])
        if len({row["num_speculative_tokens"] for row in own}) > 1
    ]
    figure, panels = figure_with_panels(len(sets))
    for panel, in_set in zip(panels, sets, strict=True):
        for number, by_method in enumerate(_groups(in_set, ["method"])):
            for own in _groups(by_method, ["temperature", "draft_sampling"]):
                facts = Facts(own)
                style = "o-" if facts["temperature"] == 0 else "s--"
                points = sorted(
                    (row["num_speculative_tokens"], row["acceptance_length"]) for row in own
                )
                label = f"{facts['method_name']}, {facts['sampling']}"
                x, y = zip(*points, strict=True)
                panel.plot(x, y, style, color=f"C{number}", label=label, markersize=4)
        ticks = sorted({row["num_speculative_tokens"] for row in in_set})
        panel.set_xticks(ticks)
        panel.set(xlabel="K, drafts a round", ylabel="AL, tokens a round")
        facts = Facts(in_set)
        _finish(panel, f"{facts['set']}, {facts['prompts']} prompts\n{facts['model']}")
    return figure


def _finish(panel: Any, title: str) -> None:
    panel.set_ylim(bottom=0)
    panel.set_title(title, fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def digest(chosen: list[dict]) -> str:
    """Digest of the rows of the plot."""
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(path: Path) -> str | None:
    """Digest of the rows that the PNG shows; None where it has none."""
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as image:
        return image.text.get(_DIGEST)


COMMAND = Command(
    examples=("report",),
    description="""
Draws every block between <!-- bench:NAME --> and <!-- /bench:NAME --> of the pages, and the plot,
from the rows in bench/results. Of several rows of the same measurement the newest is shown.
lab/tables.toml describes the tables.
""",
    options=Options,
    run=run,
)
