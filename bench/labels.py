"""Labels of rows in tables and plots: setting, method, commit."""

from peagle_jax.runs import METHOD_NAMES

SETTING = ("device", "model", "dtype", "weights", "kv_cache_dtype", "temperature")


def settings(some: list[dict]) -> list[tuple[tuple, list[dict]]]:
    """Rows by device, model, formats and temperature, first seen first."""
    groups: dict[tuple, list[dict]] = {}
    for row in some:
        groups.setdefault(tuple(row[key] for key in SETTING), []).append(row)
    return list(groups.items())


def label(row: dict) -> str:
    name = METHOD_NAMES[row["method"]]
    return name if row["method"] == "none" else f"{name} K={row['num_speculative_tokens']}"


def number_formats(dtype: str, weights: str, cache: str) -> str:
    others = [] if weights == dtype else [f"{weights} weights"]
    others += [] if cache == "auto" else [f"{cache} KV cache"]
    return f"{dtype} with {' and '.join(others)}" if others else dtype


def title(setting: tuple, some: list[dict]) -> str:
    device, model, *numbers, temperature = setting
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}"
    return (
        f"**{device}**, model {model}, {number_formats(*numbers)}, {sampling}, "
        f"{listed(some, 'max_tokens')} new tokens; {provenance(some)}"
    )


def listed(some: list[dict], name: str) -> str:
    by_date = sorted(some, key=lambda row: row["date"])
    return " and ".join(dict.fromkeys(str(row[name]) for row in by_date))


def provenance(some: list[dict]) -> str:
    day = max(row["date"] for row in some)[:10]
    return f"jax {listed(some, 'jax')}, commit {listed(some, 'sha')}, {day}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, aligned, *lines))
