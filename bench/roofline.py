"""The floor of a round: bytes moved over bandwidth, or arithmetic over peak, whichever is longer.

Counted: every weight matrix once a pass, the KV cache of each sequence once, the new rows, one embedding row
a token. Not counted: launches, softmax, sampling, norms. So no implementation is faster, and a model whose weights
stream in microseconds is bound by everything that is not counted.
"""

from dataclasses import dataclass

from peagle_jax.config import DrafterConfig, TargetConfig


@dataclass(frozen=True)
class Chip:
    """Bytes per second of device memory, and FLOP per second by dtype."""

    bandwidth: float
    peak: dict[str, float]


CHIPS = {
    # Bandwidth and bfloat16 as measured (a copy; a product of 8192³), float32 by the data sheet.
    "NVIDIA H200": Chip(4.3e12, {"bfloat16": 790e12, "float32": 67e12}),
}

_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one round works on: `accepted` drafts per sequence on average, `context` tokens before it."""

    batch: int
    context: float
    num_draft: int
    accepted: float
    dtype: str


def _layer_weights(config: TargetConfig | DrafterConfig, inputs: int) -> int:
    heads = config.num_heads * config.head_dim
    qkv = inputs * (heads + 2 * config.num_kv_heads * config.head_dim)
    return qkv + heads * config.hidden_size + 3 * config.hidden_size * config.intermediate_size


def _pass_seconds(
    config: TargetConfig | DrafterConfig,
    load: Load,
    chip: Chip,
    *,
    body: int,
    head: int,
    tokens,
    logits,
) -> float:
    """One pass over `tokens` rows, `logits` of them projected; `body` and `head` count weights."""
    item = _ITEMSIZE[load.dtype]
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    moved = body + head + kv * (load.batch * load.context + tokens) + config.hidden_size * tokens
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * load.context
    work = 2 * (tokens * body + logits * head) + tokens * attention
    return max(item * moved / chip.bandwidth, work / chip.peak[load.dtype])


def round_seconds(
    target: TargetConfig, drafter: DrafterConfig | None, load: Load, chip: Chip
) -> float:
    """Floor of one round: the target's pass over J+1 rows a sequence, then the drafter's.

    P-EAGLE is one pass over accepted + J rows; EAGLE-3 is J passes, the first over accepted + 1 rows.
    """
    D, J, B = target.hidden_size, load.num_draft, load.batch
    body = target.num_layers * _layer_weights(target, D)
    rows = B * (J + 1)
    head = target.vocab_size * D
    total = _pass_seconds(target, load, chip, body=body, head=head, tokens=rows, logits=rows)
    if drafter is None:
        return total
    d = drafter.hidden_size
    layers = _layer_weights(drafter, 2 * d) + (drafter.num_layers - 1) * _layer_weights(drafter, d)
    fc = drafter.num_taps * drafter.target_hidden_size * d
    head = drafter.draft_vocab_size * d
    one = lambda body, tokens, logits: _pass_seconds(
        drafter, load, chip, body=body, head=head, tokens=tokens, logits=logits
    )
    if drafter.method == "peagle":
        return total + one(layers + fc, B * (load.accepted + J), B * J)
    return total + one(layers + fc, B * (load.accepted + 1), B) + (J - 1) * one(layers, B, B)


def fraction(
    row: dict, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, float | None]:
    """`floor_ms` and `fraction_of_floor` of a throughput row; None where device or model is not counted.

    Counted are dense models without windows whose weights are in the row's dtype.
    """
    chip = CHIPS.get(row["device"])
    if chip is None or target.experts or target.sliding_windows or row["weights"] != row["dtype"]:
        return {"floor_ms": None, "fraction_of_floor": None}
    load = Load(
        batch=row["concurrency"],
        context=row["prompt_tokens"] / row["prompts"] + row["max_tokens"] / 2,
        num_draft=row["num_speculative_tokens"],
        accepted=row["acceptance_length"] - 1,
        dtype=row["dtype"],
    )
    floor = 1000 * round_seconds(target, drafter, load, chip)
    return {"floor_ms": floor, "fraction_of_floor": floor / row["ms_per_round"]}
