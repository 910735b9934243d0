"""Tables of the prefix cache: what it saves, and that it changes no text."""

from collections.abc import Sequence

from bench import labels


def saved_table(rows: Sequence[dict]) -> str:
    """One line per device, model and method: a second turn and a shared beginning, cold and warm."""
    header = [
        "", "turn 2: time to first token, ms, cold", "warm", "cached", "shared beginning: tokens/s, cold", "warm", "cached",
        "pages that differ from prefill's", "from plain decoding's",
    ]  # fmt: skip
    lines = [
        [
            f"{row['model']}, {labels.label(row)}, {row['device']}; {row['chat_tokens']:,} tokens; "
            f"{row.get('shared_tokens', row['chat_tokens']):,} tokens, "
            f"{min(row['concurrency'], row.get('requests', row['chats']))} at once",
            f"{row['turn_ttft_ms_cold']:,.0f}",
            f"{row['turn_ttft_ms_warm']:,.0f}",
            f"{row['turn_cached_share']:.0%}",
            f"{row['shared_tokens_per_second_cold']:,.1f}",
            f"{row['shared_tokens_per_second_warm']:,.1f}",
            f"{row['shared_cached_share']:.0%}",
            _share(row, "pages"),
            _share(row, "plain_pages"),
        ]
        for row in rows
    ]
    return f"{labels.markdown(header, lines)}\n\n{labels.provenance(list(rows))}"


def _share(row: dict, name: str) -> str:
    compared = row.get(f"{name}_compared")
    return f"{row[f'{name}_differing']:,} of {compared:,}" if compared else ""


def equal_table(rows: Sequence[dict]) -> str:
    """One line per device, model, method and concurrency: differences of warm texts, cached tokens, AL."""
    header = [
        "", "concurrency", "tokens that differ", "texts with other drafts accepted", "prompt tokens cached", "AL, warm", "cold",
    ]  # fmt: skip
    lines = [
        [
            f"{row['model']}, {row['dtype']}, {labels.label(row)}, {row['device']}",
            str(row["concurrency"]),
            f"{row['tokens_differing']:,} of {row['tokens_compared']:,}",
            f"{row['acceptance_differing']:,} of {row['texts']:,}",
            f"{row['cached_tokens'] / row['prompt_tokens']:.0%}",
            f"{row['acceptance_length']:.2f}",
            f"{row['acceptance_length_cold']:.2f}",
        ]
        for row in rows
    ]
    return f"{labels.markdown(header, lines)}\n\n{labels.provenance(list(rows))}"
