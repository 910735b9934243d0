"""Roofline of a round: the larger of bytes / bandwidth and operations / peak throughput.

Counted: each weight that a pass needs once, in its stored format; the KV cache of each sequence
once, up to a layer's window; the new rows; one embedding row per token. A mixture of experts reads
the experts that its tokens choose: with uniform routing, n tokens with k of E experts each choose
E (1 - (1 - k/E)^n) different ones. Launches, softmax, sampling and norms are not counted, so this
is a lower bound. Launches and norms bound small models, whose weights stream in microseconds.
"""

from dataclasses import dataclass

from pallas_kernels.formats import BLOCK, GROUP
from peagle_jax.config import AttentionConfig, DrafterConfig, TargetConfig


@dataclass(frozen=True)
class Chip:
    """Bytes per second of device memory, and FLOP per second by dtype."""

    bandwidth: float
    peak: dict[str, float]


CHIPS = {
    # Bandwidth and bfloat16 are measured (a copy; a product of 8192³), float32 is from the data
    # sheet.
    "NVIDIA H200": Chip(4.3e12, {"bfloat16": 790e12, "float32": 67e12}),
}

_ITEMSIZE = {"bfloat16": 2, "float32": 4}
_QUANTISED = {"fp8": 1 + 4 / BLOCK**2, "mxfp4": 1 / 2 + 1 / GROUP}
"""Bytes of one weight with its share of a scale."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes of one round: `accepted` drafts per sequence on average, `context` tokens before the
    round.

    `dtype` is that of activations and head; `weights` of the target's matrices: a dtype, "fp8"
    (attention, MLP, experts) or "mxfp4" (experts), None as `dtype`; `cache` of keys and values:
    "fp8", or "auto" as `dtype`.
    """

    batch: int
    context: float
    num_draft: int
    accepted: float
    dtype: str
    weights: str | None = None
    cache: str = "auto"

    @property
    def cache_item(self) -> int:
        """Bytes of one number in the cache."""
        return 1 if self.cache == "fp8" else _ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Cost:
    """Bytes moved and floating point operations of one pass, or of several in a row."""

    passes: tuple[tuple[float, float], ...]

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.passes + other.passes)

    @property
    def bytes(self) -> float:
        return sum(moved for moved, _ in self.passes)

    def seconds(self, chip: Chip, dtype: str) -> float:
        """Quantised weights are unpacked, so arithmetic runs at the activations' rate."""
        return sum(max(b / chip.bandwidth, w / chip.peak[dtype]) for b, w in self.passes)


def experts_read(num_experts: int, top_k: int, tokens: float) -> float:
    """Expected number of different experts that `tokens` tokens choose, each uniformly."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def _projections(layer: AttentionConfig, inputs: int, outputs: int) -> int:
    """Weights of q, k, v and output; with `shared_kv` there is no v."""
    made = layer.num_heads + (1 if layer.shared_kv else 2) * layer.num_kv_heads
    return layer.head_dim * (inputs * made + layer.num_heads * outputs)


def _cache(layers: list[AttentionConfig], load: Load, tokens: float) -> tuple[float, float]:
    """(elements of cache read and written, operations of attention) of a pass over `tokens`
    rows."""
    elements = work = 0.0
    for layer in layers:
        seen = load.context if layer.window is None else min(load.context, layer.window)
        row = 2 * layer.num_kv_heads * layer.head_dim
        elements += row * (load.batch * seen + tokens)
        work += 4 * layer.num_heads * layer.head_dim * seen * tokens
    return elements, work


def target_cost(config: TargetConfig, load: Load) -> Cost:
    """One pass of the target over J+1 rows a sequence, all of them projected to logits."""
    tokens = load.batch * (load.num_draft + 1)
    D = config.hidden_size
    item = _ITEMSIZE[load.dtype]
    quantised = _QUANTISED.get(load.weights, item)
    dense = item if load.weights == "mxfp4" else quantised
    layers = [config.attention(i) for i in range(config.num_layers)]
    attention = sum(_projections(layer, D, D) for layer in layers)
    head = config.vocab_size * D
    sparse = sum(config.is_sparse(i) for i in range(config.num_layers))
    mlps = sum(
        3 * D * config.mlp_size(i) for i in range(config.num_layers) if not config.is_sparse(i)
    )
    active = attention + mlps
    moved = active * dense
    if sparse:
        experts, expert = config.experts, sparse * 3 * D * config.intermediate_size
        read = experts_read(experts.num_experts, experts.top_k, tokens)
        router = sparse * experts.num_experts * D
        moved += read * expert * quantised + item * router
        active += experts.top_k * expert + router
    elements, work = _cache(layers, load, tokens)
    moved += item * (head + D * tokens) + load.cache_item * elements
    return Cost(((moved, 2 * tokens * (active + head) + work),))


def drafter_cost(config: DrafterConfig, load: Load) -> Cost:
    """All passes of a head for one round.

    P-EAGLE is one pass over accepted + J rows, EAGLE-3 is J passes, the first over accepted + 1
    rows. A block drafter is one pass over the rows of its block; its layers' products over the
    accepted + 1 rows of context are left out, so its floor is a little low.
    """
    D, B, J = config.hidden_size, load.batch, load.num_draft
    item = _ITEMSIZE[load.dtype]
    layers = [config.attention(i) for i in range(config.num_layers)]
    first = 2 * D if config.block is None else D  # embedding and states side by side
    body = sum(_projections(layer, D if i else first, D) for i, layer in enumerate(layers))
    body += config.num_layers * 3 * D * config.intermediate_size
    fc = config.num_taps * config.target_hidden_size * D
    head = config.draft_vocab_size * D

    def one(weights: int, tokens: float, logits: int) -> Cost:
        elements, work = _cache(layers, load, tokens)
        moved = item * (weights + head + D * tokens) + load.cache_item * elements
        return Cost(((moved, 2 * (tokens * weights + logits * head) + work),))

    if config.method == "peagle":
        return one(body + fc, B * (load.accepted + J), B * J)
    if config.block is not None:
        return one(body, B * config.block_rows(J), B * J) + Cost(
            ((item * fc, 2 * B * (load.accepted + 1) * fc),)
        )
    cost = one(body + fc, B * (load.accepted + 1), B)
    for _ in range(J - 1):
        cost += one(body, B, B)
    return cost


def round_cost(target: TargetConfig, drafter: DrafterConfig | None, load: Load) -> Cost:
    """One round: the target's pass, then the drafter's passes."""
    cost = target_cost(target, load)
    return cost if drafter is None else cost + drafter_cost(drafter, load)


def fraction(
    row: dict, target: TargetConfig, drafter: DrafterConfig | None
) -> dict[str, float | None]:
    """Row fields about the floor; None if the device is unknown.

    Args:
      row: of a throughput or decode-step measurement; its context is taken halfway through the
        output.
    Returns:
      `floor_ms`, `fraction_of_floor` (1 is the floor itself) and `bytes_per_second`, the bytes of
      the floor divided by the time of the round. None also with fp8 activations: the chip's e4m3
      rate has not been measured.
    """
    chip = CHIPS.get(row["device"])
    if chip is None or row.get("activations", "bf16") != "bf16":
        return {"floor_ms": None, "fraction_of_floor": None, "bytes_per_second": None}
    load = Load(
        batch=row["concurrency"],
        context=row["prompt_tokens"] / row["prompts"] + row["max_tokens"] / 2,
        num_draft=row["num_speculative_tokens"],
        accepted=row["acceptance_length"] - 1,
        dtype=row["dtype"],
        weights=row["weights"],
        cache=row.get("kv_cache_dtype", "auto"),
    )
    cost = round_cost(target, drafter, load)
    floor = 1000 * cost.seconds(chip, load.dtype)
    return {
        "floor_ms": floor,
        "fraction_of_floor": floor / row["ms_per_round"],
        "bytes_per_second": 1000 * cost.bytes / row["ms_per_round"],
    }
