"""Labels of rows in tables and plots: setting, method, commit."""

from peagle_jax.cli.runs import METHOD_NAMES

SETTING = ("device", "model", "dtype", "weights", "kv_cache_dtype", "activations", "temperature")


def settings(rows: list[dict]) -> list[tuple[tuple, list[dict]]]:
    """Rows by device, model, formats and temperature, first seen first."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in SETTING), []).append(row)
    return list(groups.items())


def label(row: dict) -> str:
    name = METHOD_NAMES[row["method"]]
    if row["method"] == "none":
        return name
    adaptive = row.get("adaptive", "off")
    k = f"K={row['num_speculative_tokens']}" if adaptive == "off" else f"K by {adaptive}"
    return f"{name} {k}"


def prompt_length(row: dict) -> int:
    """Tokens of each prompt of a row whose prompts are equally long."""
    return row["prompt_tokens"] // row["prompts"]


def number_formats(dtype: str, weights: str, cache: str, activations: str) -> str:
    others = [] if weights == dtype else [f"{weights} weights"]
    others += [] if cache == "auto" else [f"{cache} KV cache"]
    others += [] if activations == "bf16" else [f"{activations} activations"]
    return f"{dtype} with {' and '.join(others)}" if others else dtype


def title(setting: tuple, rows: list[dict]) -> str:
    device, model, *numbers, temperature = setting
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}"
    return (
        f"**{device}**, model {model}, {number_formats(*numbers)}, {sampling}, "
        f"{listed(rows, 'max_tokens')} new tokens; {provenance(rows)}"
    )


def listed(rows: list[dict], name: str) -> str:
    by_date = sorted(rows, key=lambda row: row["date"])
    return " and ".join(dict.fromkeys(str(row[name]) for row in by_date))


def provenance(rows: list[dict]) -> str:
    day = max(row["date"] for row in rows)[:10]
    return f"jax {listed(rows, 'jax')}, commit {listed(rows, 'sha')}, {day}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, aligned, *lines))
