"""Tiny random targets of the Llama and Qwen3 families, run with transformers.

Each becomes an ordinary Hugging Face folder and a file in `expected/` with what it computes. The
other families and the quantised files are in `families`, which records them with the code here.
Every weight is drawn anew, norms included: default initialisation leaves norms at one, and then a
test cannot see a norm that was dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TAPS = (2, 4, 5)  # vLLM's default rule (2, L/2, L-3) for eight layers
NUM_PROMPTS, PROMPT_LEN, NUM_GREEDY = 2, 41, 24
EOS_ID = 2
MIN_MARGIN = 2e-3  # best over second logit: a greedy token must not hang on rounding

COMMON = dict(
    vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=EOS_ID, dtype="float32",
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
    high_freq_factor=4.0, original_max_position_embeddings=64,
)  # fmt: skip
QWEN3_ROPE = dict(rope_type="default", rope_theta=1000000.0)
CONFIGS = {
    "llama": dict(
        head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE
    ),
    "qwen3": dict(  # 4 heads of 32: queries are twice as wide as the model
        head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=QWEN3_ROPE
    ),
}
SEEDS = {"llama": 24, "qwen3": 22}
MIN_DISTINCT = 6  # tokens of a continuation: repeating one of them would test little
MIN_ROUTING_MARGIN = 2e-4  # last chosen over first rejected expert: rounding must not flip it
SCALES = {"embed_tokens.weight": 0.1, "mask_hidden": 1.0, "bias": 0.3, "sinks": 1.0}
"""Standard deviation by the end of a parameter's name; norms are 1 + 0.2 n, the rest is 0.18 n."""


def randomise(
    model: torch.nn.Module, seed: int, keep: tuple[str, ...] = (), scales: dict | None = None
) -> None:
    """Draw every parameter anew except those whose name starts with one of `keep`.

    `scales` goes before SCALES. Gemma's `layer_scalar`, a buffer, becomes uniform in 0.5 .. 1.5.
    numpy draws them: its stream is the same on every machine, torch's is not to the last bit.
    """
    rng = np.random.default_rng(seed)
    scales = (scales or {}) | {end: s for end, s in SCALES.items() if end not in (scales or {})}
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            noise = torch.from_numpy(rng.standard_normal(param.shape, dtype=np.float32))
            if name.startswith(keep):
                continue
            if param.ndim == 1 and "norm" in name:
                param.copy_(1 + 0.2 * noise)
            else:
                scale = next((s for end, s in scales.items() if name.endswith(end)), 0.18)
                param.copy_(scale * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.fill_(rng.uniform(0.5, 1.5))


def build(family: str) -> PreTrainedModel:
    """The random target of `family` in float32 with eager attention."""
    config = AutoConfig.for_model(family, **COMMON, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomise(model, SEEDS[family])
    return model


@torch.no_grad()
def forward(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward over `tokens` [B, T], every position anew, no cache.

    Returns logits [B, T, V]; taps [B, T, 3, D], tap i being the residual stream that enters layer
    TAPS[i]; last [B, T, D], the residual stream that leaves the last layer. `last` is taken by a
    hook because transformers' own `hidden_states[-1]` is after the final norm.
    """
    seen = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out = model(tokens, use_cache=False, output_hidden_states=True)
    hook.remove()
    taps = torch.stack([out.hidden_states[i] for i in TAPS], dim=2)
    return {"logits": out.logits, "taps": taps, "last": seen[0]}


def greedy(
    model: PreTrainedModel, tokens: torch.Tensor, count: int, stops: tuple[int, ...]
) -> torch.Tensor:
    """`count` greedy tokens for each row of `tokens` by full forwards; none is one of `stops`."""
    start = tokens.shape[1]
    for _ in range(count):
        logits = forward(model, tokens)["logits"][:, -1]
        best = logits.topk(2, dim=-1).values
        margin = (best[:, 0] - best[:, 1]).min().item()
        chosen = logits.argmax(-1, keepdim=True)
        if margin < MIN_MARGIN or any(token in stops for token in chosen):
            raise ValueError(f"{margin=}, {chosen=}: this continuation is fragile, change the seed")
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens[:, start:]


def random_tokens(seed: int, *shape: int) -> torch.Tensor:
    """Token ids without the special ones (0, 1, 2) and without 255, the heads' mask token."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 255, shape))


@contextmanager
def routing_margins(model: PreTrainedModel) -> Iterator[list[float]]:
    """Collects, for each call of each router, how clear its closest choice of experts was."""
    margins = []

    def measure(router, args, outputs):
        ranked = outputs[0].sort(dim=-1, descending=True).values  # [rows, experts]
        margins.append((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min().item())

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(measure) for router in routers]
    yield margins
    for hook in hooks:
        hook.remove()


def record(model: PreTrainedModel, stops: tuple[int, ...] = (EOS_ID,)) -> dict[str, torch.Tensor]:
    """What a target computes, over B = 2 prompts of T = 41 tokens, vocabulary 256 and width D:

    tokens  int64 [B, T]          prompts
    logits  float [B, T, 256]     at every position of the prompts
    taps    float [B, T, 3, D]    residual stream entering layers 2, 4 and 5
    last    float [B, T, D]       residual stream after layer 7, before the final norm
    greedy  int64 [B, 24]         greedy continuation of each prompt, by full forwards

    D is 64, and 136 in qwen3_moe-fp8. No token of `greedy` is one of `stops`.
    """
    tokens = random_tokens(5, NUM_PROMPTS, PROMPT_LEN)
    expected = {"tokens": tokens, **forward(model, tokens)}
    with routing_margins(model) as margins:
        expected["greedy"] = greedy(model, tokens, NUM_GREEDY, stops)
    if margins and min(margins) < MIN_ROUTING_MARGIN:
        raise ValueError(f"{min(margins)=}: this routing is fragile, change the seed")
    if min(len(set(row)) for row in expected["greedy"].tolist()) < MIN_DISTINCT:
        raise ValueError("this continuation repeats itself, change the seed")
    return expected


@torch.no_grad()
def around_limit(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Where dynamic rope begins to scale, with n = max_position_embeddings:

    long_tokens    int64 [1, n + 1]
    limit_logits   float [1, 256]   at the last position of the first n tokens
    beyond_logits  float [1, 256]   at the last position of all tokens: other frequencies
    """
    n = model.config.max_position_embeddings
    tokens = random_tokens(6, 1, n + 1)
    last = lambda rows: model(rows, use_cache=False).logits[:, -1]
    # In this order: transformers keeps the longer text's frequencies for a text of exactly n
    # tokens.
    limit, beyond = last(tokens[:, :n]), last(tokens)
    return {"long_tokens": tokens, "limit_logits": limit, "beyond_logits": beyond}


def write(family: str, out: Path) -> None:
    """The checkpoint of a target, and expected/FAMILY.safetensors with what `record` returns."""
    model = build(family)
    expected = record(model)
    model.save_pretrained(out / family)
    save_expected(expected, family, out)


def save_expected(arrays: dict[str, torch.Tensor], name: str, out: Path) -> None:
    """Writes expected/NAME.safetensors: not beside a checkpoint, whose folder is all its own."""
    (out / "expected").mkdir(parents=True, exist_ok=True)
    arrays = {key: value.contiguous() for key, value in arrays.items()}
    save_file(arrays, out / "expected" / f"{name}.safetensors")
