"""Tables of models, heads and their training: bounds, options, the time of a step, empty answers."""

from bench import labels
from peagle_jax.cli.runs import METHOD_NAMES

_TOPS = ("2", "4", "16")
_OPTIONS_LEFT_OUT = ("--elements texts", "--method peagle")
"""Options of every P-EAGLE cell; the table leaves them out."""


def heads_table(rows: list[dict]) -> str:
    """One line per prompt set and head: AL, fresh AL, both with its selector, AL of oracles and with n-gram drafts."""
    header = ["prompts", "head", "K", "AL / fresh AL", "with its selector"]
    header += [f"oracle, top {top}" for top in _TOPS]
    both = lambda row, name="": (
        f"{row[f'{name}acceptance_length']:.2f} / {row[f'{name}fresh_acceptance_length']:.2f}"
    )
    lines = [
        [
            f"{row['set']} ({row['texts']})",
            METHOD_NAMES[row["method"]],
            str(row["num_speculative_tokens"]),
            both(row),
            both(row, "selected_") if row.get("selected_acceptance_length") else "",
            *(f"{row['oracle_acceptance_length'][top]:.2f}" for top in _TOPS),
            f"{row['ngram']['hybrid_acceptance_length']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (row["set"], row["method"]))
    ]
    first = rows[0]
    return (
        f"**{labels.listed(rows, 'device')}**, model {first['model']}, {first['dtype']}; "
        f"{labels.provenance(rows)}\n\n{labels.markdown([*header, 'with n-grams'], lines)}"
    )


def drafts_of(row: dict) -> int:
    """Drafts per round of an ablation's row; the first rows do not state it."""
    first = next(iter(row["sets"].values()), {})
    return row.get("num_draft", len(first.get("acceptance_per_position", ())))


def ablations_table(rows: list[dict]) -> str:
    """A table for each K, with a line per cell: steps, and AL / fresh AL on held-out texts and every prompt set."""
    numbers = sorted({drafts_of(row) for row in rows}, reverse=True)
    parts = ([row for row in rows if drafts_of(row) == number] for number in numbers)
    return "\n\n".join(map(_ablations_table, parts))


def _ablations_table(rows: list[dict]) -> str:
    sets = sorted({name for row in rows for name in row["sets"]})
    both = lambda lengths: (
        f"{lengths['acceptance_length']:.2f} / {lengths['fresh_acceptance_length']:.2f}"
    )
    lines = [
        [
            f"`{row['cell']}`: {_options(row)}",
            f"{row['steps']:,}",
            both(row["validation"]),
            *(both(row["sets"][name]) if name in row["sets"] else "" for name in sets),
        ]
        for row in sorted(rows, key=lambda row: (-row["steps"], row["cell"]))
    ]
    header = ["cell", "steps", "held out", *sets]
    return (
        f"**{labels.listed(rows, 'device')}**, AL / fresh AL at K = {drafts_of(rows[0])}; {labels.provenance(rows)}\n\n"
        f"{labels.markdown(header, lines)}"
    )


def _options(row: dict) -> str:
    text = row["options"]
    for one in _OPTIONS_LEFT_OUT:
        text = text.replace(one, "")
    return f"`{' '.join(text.split())}`" if text.split() else "no further option"


def trained_heads_table(rows: list[dict]) -> str:
    """One line per head: steps and minutes of its part of the training, AL and fresh AL by K."""
    drafts = sorted(rows[0]["acceptance_length"], key=int)
    lines = [
        [
            METHOD_NAMES[row["method"]],
            row["head"],
            f"{row['steps']:,}" if row["steps"] else "",
            f"{row['minutes']:.1f}" if row["minutes"] else "",
            *(
                f"{row['acceptance_length'][k]:.2f} / {row['fresh_acceptance_length'][k]:.2f}"
                for k in drafts
            ),
        ]
        for row in sorted(rows, key=lambda row: (row["part"], row["method"]))
    ]
    header = ["method", "head", "steps", "minutes", *(f"K = {k}" for k in drafts)]
    return (
        f"**{labels.listed(rows, 'device')}**, AL / fresh AL on {rows[0]['texts']} held-out texts; "
        f"{labels.provenance(rows)}\n\n{labels.markdown(header, lines)}"
    )


FORM_NAMES = {
    "anchors": "P-EAGLE, by anchors",
    "texts": "P-EAGLE, by texts",
    "picked": "P-EAGLE, half of the anchors",
    "eagle3": "EAGLE-3",
    "eagle3-picked": "EAGLE-3, half of the anchors",
}
"""Forms of the training step -> their names in tables and plots."""


def train_step_table(rows: list[dict]) -> str:
    """One line per form, length and options of the training step."""
    order = list(FORM_NAMES)
    lines = [
        [
            FORM_NAMES[row["form"]],
            f"{row['texts']} x {row['tokens']:,}",
            f"`{row['options']}`" if row["options"] else "",
            f"{row['ms_per_step']:.1f}",
            f"{row['tokens_per_second'] / 1e6:.2f}",
            "" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}",
        ]
        for row in sorted(
            rows, key=lambda row: (row["tokens"], order.index(row["form"]), row["options"])
        )
    ]
    header = ["step", "texts x tokens", "further options", "ms", "million tokens/s", "GiB"]
    return (
        f"**{labels.listed(rows, 'device')}**, {labels.listed(rows, 'dtype')}; {labels.provenance(rows)}\n\n"
        f"{labels.markdown(header, lines)}"
    )


def humaneval_table(rows: list[dict]) -> str:
    """One line per temperature and number of samples: solved problems, and what the texts are like."""
    syntax = lambda row: (
        row["errors"].get("SyntaxError", 0) + row["errors"].get("IndentationError", 0)
    )
    share = lambda value: "" if value is None else f"{100 * value:.1f} %"
    lines = [
        [
            f"{row['temperature']:g}",
            str(row["samples"]),
            share(row["pass@1"]),
            share(row.get("pass@10")),
            f"{row['solved']} of {row['problems']}",
            share(syntax(row) / (row["problems"] * row["samples"])),
            share(row["repeated_8grams"]),
        ]
        for row in sorted(rows, key=lambda row: row["temperature"])
    ]
    header = [
        "temperature",
        "samples",
        "pass@1",
        "pass@10",
        "solved",
        "no valid syntax",
        "repeated",
    ]
    return (
        f"**{labels.listed(rows, 'device')}**, model {rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['max_tokens']} new tokens; "
        f"{labels.provenance(rows)}\n\n{labels.markdown(header, lines)}"
    )


def prompt_ends_table(rows: list[dict]) -> str:
    """One line per end of prompts: share of empty answers to prompts as they are, and to healed ones."""
    shares = {(row["end"], row["healed"]): f"{100 * row['empty']:.1f} %" for row in rows}
    lines = [
        [end, *(shares.get((end, is_healed), "") for is_healed in (False, True))]
        for end in dict.fromkeys(row["end"] for row in rows)
    ]
    first = rows[0]
    return (
        f"**{labels.listed(rows, 'device')}**, model {first['model']}, {first['dtype']}, {first['prompts']} prompts of each end, "
        f"{first['max_tokens']} new tokens; {labels.provenance(rows)}\n\n"
        f"{labels.markdown(['prompt ends', 'empty answers', 'without the last token'], lines)}"
    )
