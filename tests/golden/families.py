"""Tiny random targets of the other families, in the layouts of released files.

Nine checkpoints, each with expected/NAME.safetensors as `targets.record` says. A file holds
bfloat16 and what `quantise` makes; transformers computes in float32 with exactly the values that
the file stands for, so a loader that decodes it into float32 has the same weights bit for bit. The
FP8 targets are weight-only in that sense: activations are never rounded.

    gpt_oss-mxfp4      window 8 in every other layer, sinks, biases, YaRN, 8 experts of which 4;
                       MXFP4 experts; config.json as released
    gpt_oss-bf16       4 experts of which 2, in-by-out and interleaved as transformers holds them;
                       weights and config.json as transformers writes them (`rope_parameters`)
    qwen3_moe-bf16     8 experts of which 4; as transformers writes it, which splits the experts
    qwen3_moe-fp8      width 136 and queries of 144: 128-blocks with a ragged last one in both axes;
                       experts in layers 1, 5 and 7 only
    qwen3-fp8-channel  compressed-tensors FP8_DYNAMIC: one scale per row
    llama-fp8-tensor   quant_method fp8 without block size: scalar scales, and input scales; biases
                       in attention and MLP, linear rope
    mistral            window 8 in all layers; dynamic rope over 96 positions
    qwen2              biases of q, k and v; window 8 from layer 5 on
    gemma4             Gemma4ForConditionalGeneration with its vision tower: 3 sliding and 1 full
                       layer, twice; soft cap 5, for with 30 the tiny logits would not reach it

`gemma4-text` is a config.json alone: the same text model in the form that transformers 5 saves
(`per_layer_config`). Its checkpoint would be that of gemma4 without the vision tensors, with
`model.language_model.` renamed to `model.`.

Each has a generation_config.json with more than one end-of-sequence id.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import quantise
import released
import targets
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, torch.Tensor]


def views(model: PreTrainedModel) -> Tensors:
    """The weights by their names in a file. They share memory with the model: writing is setting.

    Only Qwen3-MoE's names differ: the model stacks its experts [E, 2I, H] and [E, H, I], files
    have them one by one.
    """
    saved = model.state_dict().keys()
    found = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    if model.config.model_type != "qwen3_moe":
        return found
    split = {}
    for name, param in found.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            split[name] = param
            continue
        experts, which = name.rsplit(".", 1)
        for i, expert in enumerate(param):
            parts = expert.chunk(2) if which == "gate_up_proj" else [expert]
            keys = ["gate_proj", "up_proj"] if which == "gate_up_proj" else ["down_proj"]
            split |= {f"{experts}.{i}.{k}.weight": x for k, x in zip(keys, parts, strict=True)}
    return split


def in_bfloat16(name: str, weight: torch.Tensor, rng: np.random.Generator) -> Tensors:
    """The weight rounded, in the model too."""
    weight.copy_(weight.bfloat16())
    return {name: weight.bfloat16()}


def in_mxfp4(name: str, weight: torch.Tensor, rng: np.random.Generator) -> Tensors:
    """gpt-oss experts: rows are output channels, those of gate_up alternately gate and up."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return in_bfloat16(name, weight, rng)
    rows = weight.transpose(1, 2)  # the model holds in-by-out
    blocks, scales, decoded = quantise.mxfp4(rows)
    rows.copy_(decoded)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def in_fp8(
    name: str,
    weight: torch.Tensor,
    rng: np.random.Generator,
    *,
    block: tuple[int | None, int | None],
    suffix: str,
    scale_dtype: torch.dtype,
    scalar: bool = False,
) -> Tensors:
    """Linear weights but routers in E4M3; None stands for a whole axis.

    Blocks are first made unequal, or a loader that mixes up their scales would not be seen.
    `scalar` drops the axes of the scale and adds an input scale, which changes nothing.
    """
    if not re.search(r"layers\..*_proj\.weight$", name):
        return in_bfloat16(name, weight, rng)
    block = tuple(size or whole for size, whole in zip(block, weight.shape, strict=True))
    for band in weight.split(block[0], 0):
        for tile in band.split(block[1], 1):
            tile.mul_(rng.uniform(0.5, 1.5))
    stored, scales, decoded = quantise.fp8(weight, block, scale_dtype)
    weight.copy_(decoded)
    files = {name: stored, f"{name}_{suffix}": scales.squeeze() if scalar else scales}
    if scalar:
        input_scale = torch.tensor(rng.uniform(0.01, 0.1), dtype=torch.float32)
        files[name.removesuffix("weight") + "input_scale"] = input_scale
    return files


BLOCK_FP8 = partial(in_fp8, block=(128, 128), suffix="scale_inv", scale_dtype=torch.bfloat16)
CHANNEL_FP8 = partial(in_fp8, block=(1, None), suffix="scale", scale_dtype=torch.bfloat16)
TENSOR_FP8 = partial(
    in_fp8, block=(None, None), suffix="scale", scale_dtype=torch.float32, scalar=True
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One checkpoint: its config.json and generation_config.json, and how its weights are stored.

    With `resave`, transformers writes weights and config.json instead, in its own present form.
    """

    config: dict
    generation: dict
    seed: int
    store: Callable[[str, torch.Tensor, np.random.Generator], Tensors] = in_bfloat16
    scales: dict = field(default_factory=dict)
    resave: bool = False


# Standard deviations that let each rule show and keep float32 within 1e-4 of float64: a gate_up of
# one drives the experts of gpt-oss into their clamp; what comes out must not swamp the rest.
GPT_OSS_SCALES = {
    "experts.gate_up_proj": 1.0, "experts.down_proj": 0.03, "router.weight": 0.3,
    "embed_tokens.weight": 0.3, "q_proj.weight": 0.12, "k_proj.weight": 0.12,
}  # fmt: skip
QWEN3_MOE_SCALES = {
    "experts.gate_up_proj": 0.3, "experts.down_proj": 0.3, "mlp.gate.weight": 0.3,
    "embed_tokens.weight": 0.5,
}  # fmt: skip
TIED_QWEN3_MOE_SCALES = {
    "experts.gate_up_proj": 0.2, "experts.down_proj": 0.3, "mlp.gate.weight": 0.2,
    "embed_tokens.weight": 0.2,
}  # fmt: skip
TARGETS = {
    "gpt_oss-mxfp4": Target(
        config=released.gpt_oss(quantization_config=released.MXFP4),
        generation=released.GPT_OSS_GENERATION, seed=31, store=in_mxfp4, scales=GPT_OSS_SCALES,
    ),
    "gpt_oss-bf16": Target(
        config=released.gpt_oss(
            num_attention_heads=4, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            experts_per_token=2, intermediate_size=12,
        ),
        generation=released.GPT_OSS_GENERATION, seed=62, scales=GPT_OSS_SCALES, resave=True,
    ),
    "qwen3_moe-bf16": Target(
        config=released.qwen3_moe(), generation=released.QWEN3_GENERATION, seed=63,
        scales=QWEN3_MOE_SCALES, resave=True,
    ),
    "qwen3_moe-fp8": Target(
        config=released.qwen3_moe(
            hidden_size=136, head_dim=18, moe_intermediate_size=8, num_experts=4,
            num_experts_per_tok=2, tie_word_embeddings=True, intermediate_size=24,
            decoder_sparse_step=2, mlp_only_layers=[3],
            quantization_config=released.block_fp8(num_layers=8),
        ),
        generation=released.QWEN3_GENERATION, seed=44, store=BLOCK_FP8,
        scales=TIED_QWEN3_MOE_SCALES,
    ),
    "qwen3-fp8-channel": Target(
        config=released.qwen3(quantization_config=released.CHANNEL_FP8),
        generation=released.QWEN3_GENERATION, seed=45, store=CHANNEL_FP8,
    ),
    "llama-fp8-tensor": Target(
        config=released.llama(
            tie_word_embeddings=True, quantization_config=released.TENSOR_FP8,
            attention_bias=True, mlp_bias=True, rope_scaling=dict(factor=4.0, type="linear"),
        ),
        generation=released.LLAMA_GENERATION, seed=36, store=TENSOR_FP8,
    ),
    "mistral": Target(
        config=released.mistral(rope_scaling=dict(factor=4.0, type="dynamic")),
        generation=released.MISTRAL_GENERATION, seed=100, scales={"embed_tokens.weight": 0.3},
    ),
    "qwen2": Target(
        config=released.qwen2(), generation=released.QWEN2_GENERATION, seed=127,
        scales={"embed_tokens.weight": 0.3},
    ),
    "gemma4": Target(
        config=released.gemma4(), generation=released.GEMMA4_GENERATION, seed=97,
        scales={"language_model.embed_tokens.weight": 0.15},
    ),
}  # fmt: skip


def build(target: Target) -> PreTrainedModel:
    """The random target in float32 with eager attention, before rounding."""
    settings = copy.deepcopy(target.config)  # transformers writes into the inner dicts
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    targets.randomise(model, target.seed, scales=target.scales)
    return model


@torch.no_grad()
def store(target: Target, model: PreTrainedModel) -> Tensors:
    """The tensors of the file; the model's weights become what they stand for."""
    rng = np.random.default_rng(target.seed)
    tensors = {}
    for name, weight in sorted(views(model).items()):
        tensors |= target.store(name, weight, rng)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write(name: str, out: Path) -> None:
    """The checkpoint of target `name`, and expected/NAME.safetensors as `targets.record` says."""
    target = TARGETS[name]
    model = build(target)
    tensors = store(target, model)
    expected = targets.record(model, stops=tuple(target.generation["eos_token_id"]))
    if "dynamic" in str(target.config.get("rope_scaling")):
        expected |= targets.around_limit(model)
    folder = out / name
    if target.resave:
        model.bfloat16().save_pretrained(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(target.config, folder / "config.json")
    write_json(target.generation, folder / "generation_config.json")
    targets.save_expected(expected, name, out)
    if name == "gemma4":
        text = model.config.text_config
        text.architectures, text.dtype = ["Gemma4ForCausalLM"], torch.bfloat16
        text.save_pretrained(out / "gemma4-text")
        write_json(target.generation, out / "gemma4-text" / "generation_config.json")


def write_json(content: dict, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
