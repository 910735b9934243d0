"""The README's blocks: one number, rounds of a full-size model beside another engine, losslessness."""

from bench import labels
from peagle_jax.config import ConfigError

SHAPE = "qwen3-coder-30b-a3b-fp8"
"""Preset of the README's plot and table of speed."""
SYNTHETIC = 3.1
"""Synthetic acceptance length of its rows with a head."""
PROMPT = 512
"""Tokens of their prompts."""
_POINT = ("method", "num_speculative_tokens", "concurrency")


def tokens_per_round(rows: list[dict]) -> str:
    """One sentence: the acceptance length of P-EAGLE at its largest K on HumanEval, and that of fresh rounds.

    Args:
      rows: of kinds acceptance and headroom.
    Raises:
      ConfigError: there is no row of acceptance.
    """
    of = lambda kind: [
        row
        for row in rows
        if (row["kind"], row["method"], row["set"]) == (kind, "peagle", "HumanEval")
    ]
    if not of("acceptance"):
        raise ConfigError("bench:headline needs acceptance rows of P-EAGLE on HumanEval")
    row = max(of("acceptance"), key=lambda row: row["num_speculative_tokens"])
    same = ("model", "num_speculative_tokens")
    fresh = "".join(
        f" ({one.get('selected_fresh_acceptance_length') or one['fresh_acceptance_length']:.2f} in rounds whose last "
        "8 tokens are new to the text)"
        for one in of("headroom")
        if all(one[name] == row[name] for name in same)
    )
    return (
        f"**{row['acceptance_length']:.2f} tokens per round instead of 1**{fresh}: P-EAGLE with K = "
        f"{row['num_speculative_tokens']}, {row['model']} model, {row['prompts']} prompts of HumanEval, "
        f"{row['max_tokens']} new tokens, greedy, {row['dtype']} (commit {row['sha']}, {row['date'][:10]})."
    )


def shape_rows(rows: list[dict], activations: str = "bf16") -> list[dict]:
    """Decode rows of `SHAPE` at the concurrencies that plain decoding has, too; may be none."""
    chosen = [
        row
        for row in rows
        if (row["kind"], row.get("model")) == ("decode-step", SHAPE)
        and row["kv_cache_dtype"] == "auto"
        and row.get("activations", "bf16") == activations
        and row["synthetic_acceptance_length"] in (None, SYNTHETIC)
        and labels.prompt_length(row) == PROMPT
    ]
    plain = {row["concurrency"] for row in chosen if row["method"] == "none"}
    return [row for row in chosen if row["concurrency"] in plain]


def shape_caption(rows: list[dict]) -> str:
    """Caption of the plot of `shape_rows`, with the commits of its rows.

    Raises:
      ConfigError: there are no such rows.
    """
    chosen = shape_rows(rows)
    if not chosen:
        raise ConfigError(f"bench:shape needs decode-step rows of {SHAPE} without speculation")
    return (
        f"Qwen3-Coder-30B-A3B in FP8 on one {labels.listed(chosen, 'device')}, random weights, temperature "
        f"{chosen[0]['temperature']:g}, {PROMPT} prompt tokens, output tokens/s of a full batch. Both heads have a "
        f"synthetic AL (tokens per round) of {SYNTHETIC}: as many drafts are accepted as give it. So the plot "
        f"compares the cost of rounds, not the quality of heads ({labels.provenance(chosen)})."
    )


def pairs(rows: list[dict], activations: str = "bf16") -> list[tuple[dict, dict]]:
    """(row of this engine, row of the other) of the same method, K and concurrency of `SHAPE`."""
    point = lambda row: tuple(row[name] for name in _POINT)
    ours = {point(row): row for row in shape_rows(rows, activations)}
    theirs = [row for row in rows if (row["kind"], row.get("model")) == ("reference", SHAPE)]
    return [(ours[point(row)], row) for row in theirs if point(row) in ours]


def beside_table(rows: list[dict]) -> str:
    """Milliseconds of rounds and of prefill by concurrency, the other engine's in brackets; those of heads also with fp8
    activations.

    Raises:
      ConfigError: there is no pair of rows.
    """
    plain = pairs(rows)
    if not plain:
        raise ConfigError(f"bench:beside needs decode-step and reference rows of {SHAPE}")
    quantised = [pair for pair in pairs(rows, "fp8") if pair[0]["method"] != "none"]
    matched = [("", *pair) for pair in plain]
    matched += [(", fp8 activations", *pair) for pair in quantised]
    across = sorted({theirs["concurrency"] for _, _, theirs in matched})
    lines: dict[str, dict[int, str]] = {}
    for name, what, digits in (("ms_per_round", "round", 2), ("prefill_ms", "prefill", 0)):
        for mode, ours, theirs in matched:
            if theirs[name] is not None:
                text = f"{ours[name]:.{digits}f} ({_about(theirs)}{theirs[name]:.{digits}f})"
                line = lines.setdefault(f"{labels.label(theirs)}{mode}, {what}", {})
                line[theirs["concurrency"]] = text
    _, first, other = matched[0]
    header = [f"ms, in brackets {other['engine']}", *(f"concurrency {one}" for one in across)]
    cells = [[line, *(texts.get(one, "") for one in across)] for line, texts in lines.items()]
    return (
        f"**{first['device']}**, {SHAPE}, random weights, temperature {first['temperature']:g}, "
        f"synthetic AL {SYNTHETIC}; {labels.provenance([ours for _, ours, _ in matched])}\n\n"
        f"{labels.markdown(header, cells)}"
    )


def reference_table(rows: list[dict]) -> str:
    """All rows of another engine: milliseconds of a round and of prefill by method and concurrency."""
    across = sorted({row["concurrency"] for row in rows})
    lines: dict[str, dict[int, str]] = {}
    for name, what, digits in (("ms_per_round", "round", 2), ("prefill_ms", "prefill", 0)):
        for row in rows:
            if row[name] is not None:
                line = lines.setdefault(f"{labels.label(row)}, {what}", {})
                line[row["concurrency"]] = f"{_about(row)}{row[name]:.{digits}f}"
    header = [f"ms, {rows[0]['engine']}", *(f"concurrency {one}" for one in across)]
    cells = [[line, *(texts.get(one, "") for one in across)] for line, texts in lines.items()]
    return labels.markdown(header, cells)


def _about(row: dict) -> str:
    return "about " if row["approximate"] else ""


def lossless_sum(rows: list[dict]) -> str:
    """One sentence: greedy tokens compared with plain decoding, and how many differ."""
    total = lambda name: sum(row[name] for row in rows)
    models = len({row["model"] for row in rows})
    devices = labels.listed(rows, "device")
    return (
        f"{total('tokens_compared'):,} greedy tokens of {models} models were compared with plain decoding, on {devices}: "
        f"**{total('tokens_differing'):,} differ** ([tables with commits](docs/results.md#losslessness))."
    )
