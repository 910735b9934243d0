"""Layouts of released checkpoints from their headers; tensors that do not fit together."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoint.head_json import drafter_config
from peagle_jax.checkpoint.safetensors import CheckpointError, TensorInfo
from peagle_jax.checkpoint.tables import (
    Layout,
    head_layout,
    head_tensors,
    target_layout,
    target_tensors,
)
from peagle_jax.config import TargetConfig
from peagle_jax.method.block_head import make_head
from peagle_jax.models import build
from peagle_jax.presets import PRESETS
from tests import tiny
from tests.checkpoint import released

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248, "mistral-7b-v0.1": 7_241_732_096, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-32b": 32_763_876_352, "qwen3-coder-30b-a3b": 30_532_122_624,
    "gpt-oss-120b": 116_829_156_672, "gemma-4-31b": 30_697_345_340,
}  # fmt: skip
"""Numbers of parameters: the published ones say as much with fewer digits."""


def made(layout: Layout, tensors: released.Headers) -> dict[tuple, tuple[int, ...]]:
    """Shapes of what the rules will make, by path."""
    assert len({rule.path for rule in layout.rules}) == len(layout.rules), "two rules make one"
    shapes = {name: info.shape for name, info in tensors.items()}
    return {
        path: transform.shape([shapes[name] for name in names])
        for path, names, transform in layout.rules
    }


@pytest.mark.parametrize("name", PRESETS)
def test_invented_tensors_have_a_place(name):
    config = PRESETS[name]
    target_layout(config, target_tensors(config, released.BF16)).check(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name):
    config = PRESETS[name]
    tensors = target_tensors(config, released.BF16)
    model = nnx.eval_shape(lambda: build(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    params = dict(nnx.to_flat_state(nnx.state(model)))
    shapes = {path: param.shape for path, param in params.items()}
    assert made(target_layout(config, tensors), tensors) == shapes
    assert sum(map(prod, shapes.values())) == PUBLISHED[name]


def test_the_released_20b_head_has_a_place_for_every_tensor(tmp_path):
    tensors = released.aws_gpt_oss_20b_head()
    released.write_config(tmp_path, released.AWS_GPT_OSS_20B_HEAD)
    config = drafter_config(tmp_path, PRESETS["gpt-oss-20b"], set(tensors), fused_width=8640)
    assert (config.method, config.mask_token_id, config.taps) == ("peagle", 201020, None)
    found = head_layout(config, tensors)
    found.check("the head")
    assert {*found.dropped} == {"d2t", "t2d"}
    shapes = made(found, tensors)
    head = nnx.eval_shape(lambda: make_head(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    params = dict(nnx.to_flat_state(nnx.state(head)))
    assert shapes == {path: param.shape for path, param in params.items()}
    count = sum(map(prod, shapes.values()))
    assert round(count / 1e9, 2) == 1.80  # as published
    again = head_tensors(config, released.BF16)
    assert {n: x.shape for n, x in again.items()} == {
        n: x.shape for n, x in tensors.items() if n not in ("d2t", "t2d")
    }


def tensors_of(family: str, **changes) -> tuple[TargetConfig, released.Headers]:
    config = replace(tiny.TARGET, **(tiny.FAMILIES.get(family, {}) | changes))
    return config, target_tensors(config, released.BF16)


def with_dtype(tensors: released.Headers, ends: tuple[str, ...], dtype) -> released.Headers:
    change = lambda info: replace(info, dtype=np.dtype(dtype)) if info.name.endswith(ends) else info
    return {name: change(info) for name, info in tensors.items()}


def scales_for(tensors: released.Headers, ends: tuple[str, ...], shape=None) -> released.Headers:
    """Scales of the weights that end so, one a row unless `shape` says else."""
    out = {}
    for info in tensors.values():
        if info.name.endswith(ends):
            name = f"{info.name}_scale"
            out[name] = TensorInfo(name, np.dtype(np.float32), shape or (info.shape[0], 1), 0, 0)
    return out


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def test_some_matrices_may_be_quantised_and_others_not():
    config, tensors = tensors_of("qwen3")
    tensors = with_dtype(tensors, QKV, released.FP8) | scales_for(tensors, QKV)
    found = target_layout(config, tensors)
    found.check("qwen3")
    scales = [rule.path for rule in found.rules if rule.path[-1] == "scale"]
    assert scales == [("layers", i, "attention", "qkv", "scale") for i in range(config.num_layers)]


def test_scales_of_activations_and_of_the_cache_are_dropped():
    config, tensors = tensors_of("qwen3")
    for name in ("q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale"):
        full = f"model.layers.1.self_attn.{name}"
        tensors[full] = TensorInfo(full, np.dtype(np.float32), (), 0, 0)
    found = target_layout(config, tensors)
    found.check("qwen3")
    assert len(found.dropped) == 3


def test_what_is_missing_and_what_is_left_over_is_listed():
    config, tensors = tensors_of("qwen3_moe")
    gone = [name for name in tensors if "layers.1.mlp.experts.2." in name]
    tensors = {name: info for name, info in tensors.items() if name not in gone}
    extra = TensorInfo("model.layers.0.mlp.shared_expert.weight", released.BF16, (4, 4), 0, 0)
    found = target_layout(config, tensors | {extra.name: extra})
    assert sorted(found.missing) == sorted(gone)
    assert found.leftovers == [extra.name]
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' is missing \(and 2 more\)"):
        found.check("qwen3_moe")
    with pytest.raises(CheckpointError, match=r"without a place in qwen3_moe: \['model.layers.0"):
        replace(found, missing=[]).check("qwen3_moe")


REFUSED = [
    ("qwen3", lambda t: with_dtype(t, QKV, released.FP8), "weight_scale_inv nor its weight_scale"),
    (
        "qwen3",
        lambda t: with_dtype(t, QKV[:1], released.FP8) | scales_for(t, QKV[:1]),
        "both must be quantised or neither",
    ),
    (
        "qwen3",
        lambda t: with_dtype(t, QKV[:1], np.float32),
        r"q_proj.weight is float32 but .*k_proj.weight is bfloat16; .*float32 holds both exactly",
    ),
    (
        "llama",
        lambda t: with_dtype(t, QKV[1:], np.float16),
        r"q_proj.weight is bfloat16 but .*k_proj.weight is float16; .*float32 holds both exactly",
    ),
    (
        "gemma4",
        lambda t: with_dtype(t, ("up_proj.weight",), np.float64),
        r"gate_proj.weight is bfloat16 but .*up_proj.weight is float64; .*\(float64 holds both",
    ),
    (
        "gpt_oss",
        lambda t: with_dtype(t, ("v_proj.bias",), np.float16),
        "q_proj.bias is bfloat16 but .*v_proj.bias is float16",
    ),
    (
        "qwen3_moe",
        lambda t: with_dtype(t, ("experts.3.down_proj.weight",), np.float16),
        "experts.0.down_proj.weight is bfloat16 but .*experts.3.down_proj.weight is float16",
    ),
    (
        "qwen3",
        lambda t: (
            with_dtype(t, QKV, released.FP8)
            | scales_for(t, QKV)
            | with_dtype(scales_for(t, QKV[:1]), ("scale",), released.BF16)
        ),
        "q_proj.weight_scale is bfloat16 but .*k_proj.weight_scale is float32",
    ),
    (
        "qwen3_moe",
        lambda t: (
            with_dtype(t, ("1.up_proj.weight",), released.FP8)
            | scales_for(t, ("1.up_proj.weight",))
        ),
        "both must be quantised or neither",
    ),
    (
        "qwen3",
        lambda t: with_dtype(t, QKV, released.FP8) | scales_for(t, QKV, (5, 5)),
        r"scale of shape \(5, 5\) does not fit a weight",
    ),
    (
        "qwen3",
        lambda t: (
            with_dtype(t, QKV, released.FP8) | with_dtype(scales_for(t, QKV), ("scale",), np.int32)
        ),
        "an FP8 scale is a float",
    ),
    ("qwen3", lambda t: with_dtype(t, QKV, "float8_e5m2"), "is float8_e5m2; a weight"),
    ("llama", lambda t: with_dtype(t, ("down_proj.weight",), np.int8), "is int8; a weight"),
    ("llama", lambda t: with_dtype(t, ("lm_head.weight",), released.FP8), "only the matrices of"),
    ("qwen3_moe", lambda t: with_dtype(t, ("gate.weight",), released.FP8), "only the matrices of"),
    ("gpt_oss", lambda t: with_dtype(t, ("down_proj",), released.FP8), "only the matrices of"),
    (
        "llama",
        lambda t: t | {"model.norm.weight": replace(t["model.norm.weight"], shape=(33,))},
        r"model.norm.weight has shape \(33,\), the config says \(32,\)",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_tensors_that_do_not_fit_together_are_refused(family, change, message):
    config, tensors = tensors_of(family)
    with pytest.raises(CheckpointError, match=message):
        target_layout(config, change(tensors))
