"""Tables of new rows on the terminal, and texts from the fields of rows. printed.toml has the
columns."""

import re
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from peagle_jax.cli.runs import METHOD_NAMES, table

PRINTED: dict[str, list] = tomllib.loads(
    Path(__file__).with_name("printed.toml").read_text(encoding="utf-8")
)
_DEFAULTS = {"kv_cache_dtype": "auto", "activations": "bf16", "adaptive": "off", "date": ""}
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


def show(name: str, done: Sequence[dict], out: Path) -> None:
    """Prints the new rows of a command, in columns that have values, and the file that has them."""
    header, lines = cells(PRINTED[name], [[derived(row)] for row in done])
    print(table(header, lines))
    print(f"rows: {out}")


def derived(row: dict) -> dict:
    """A row with what tables say of it in words."""
    row = _DEFAULTS | {"weights": row.get("dtype")} | row
    made: dict[str, Any] = {"day": row["date"][:10], "close": ")"}
    if (method := row.get("method")) in METHOD_NAMES and "num_speculative_tokens" in row:
        k = f"K={row['num_speculative_tokens']}"
        drafts = k if row["adaptive"] == "off" else f"K by {row['adaptive']}"
        name = METHOD_NAMES[method]
        made["label"] = name if method == "none" else f"{name} {drafts}"
        made["method_name"] = name
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
    if "codes" in row:
        made["statuses"] = ", ".join(f"{n:,} {code}" for code, n in row["codes"].items())
    if "bytes_per_second" in row and row["bytes_per_second"] is not None:
        made["terabytes_per_second"] = row["bytes_per_second"] / 1e12
    if row.get("approximate"):
        made["about"] = "about "
    return row | made


def _load(row: dict) -> str:
    if row["rate"] is not None:
        return f"{row['rate']:g} requests/s"
    seconds = f", mixed lengths for {row['duration']} s" if row.get("duration") else ""
    several = f", {row['api_processes']} API processes" if row["api_processes"] > 1 else ""
    return f"{row['concurrency']} requests{seconds}{several}"


class Facts(dict):
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


def text_of(template: str | Sequence[str], facts: Facts) -> str:
    """A template, or the parts of one; a part whose fields are not all there is empty."""
    if not isinstance(template, str):
        return "".join(text_of(part, facts) for part in template)
    names = [re.split(r"[\[.]", name)[0] for _, name, _, _ in Formatter().parse(template) if name]
    if any(facts[name] is None for name in names):
        return ""
    return template.format(**{name: facts[name] for name in names})


def cells(columns: list, groups: list[list[dict]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines, without columns that are empty in all lines."""
    lines = [[text_of(text, Facts(group)) for _, text in columns] for group in groups]
    filled = [place for place in range(len(columns)) if any(line[place] for line in lines)]
    header = [columns[place][0] for place in filled]
    return header, [[line[place] for place in filled] for line in lines]
