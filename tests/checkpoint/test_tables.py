"""Layouts of the released checkpoints, from their headers alone; and tensors that do not fit
together.
"""

from dataclasses import replace
from functools import cache
from math import prod

import jax
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import formats
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
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import build
from peagle_jax.presets import PRESETS
from tests import tiny
from tests.checkpoint import released

RELEASED = {
    "llama-3.1-8b": (released.llama_8b, 8_030_261_248),
    "mistral-7b-v0.1": (lambda: released.mistral_7b(32000), 7_241_732_096),
    "mistral-7b-v0.3": (lambda: released.mistral_7b(32768), 7_248_023_552),
    "qwen2.5-0.5b": (
        lambda: released.qwen2_5(layers=24, D=896, kv=128, F=4864, tied=True),
        494_032_768,
    ),
    "qwen2.5-1.5b": (
        lambda: released.qwen2_5(layers=28, D=1536, kv=256, F=8960, tied=True),
        1_543_714_304,
    ),
    "qwen2.5-3b": (
        lambda: released.qwen2_5(layers=36, D=2048, kv=256, F=11008, tied=True),
        3_085_938_688,
    ),
    "qwen2.5-7b": (
        lambda: released.qwen2_5(layers=28, D=3584, kv=512, F=18944, tied=False),
        7_615_616_512,
    ),
    "qwen2.5-14b": (
        lambda: released.qwen2_5(layers=48, D=5120, kv=1024, F=13824, tied=False),
        14_770_033_664,
    ),
    "qwen2.5-32b": (
        lambda: released.qwen2_5(layers=64, D=5120, kv=1024, F=27648, tied=False),
        32_763_876_352,
    ),
    "gpt-oss-20b": (lambda: released.gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": (lambda: released.gpt_oss(36, 128), 116_829_156_672),
    "qwen3-coder-30b-a3b": (lambda: released.qwen3_coder(fp8=False), 30_532_122_624),
    "qwen3-coder-30b-a3b fp8": (lambda: released.qwen3_coder(fp8=True), 30_532_122_624),
    "gemma-4-31b": (released.gemma_4_31b, 30_697_345_340),
}
"""Headers, and the number of parameters: the published ones say as much with fewer digits."""


def preset(name: str) -> TargetConfig:
    return PRESETS[name.removesuffix(" fp8")]


@cache
def headers(name: str) -> released.Headers:
    return RELEASED[name][0]()


@cache
def layout(name: str) -> Layout:
    return target_layout(preset(name), headers(name))


def made(layout: Layout, tensors: released.Headers) -> dict[tuple, jax.ShapeDtypeStruct]:
    """What the rules will make, by path."""
    out = {}
    for path, names, transform in layout.rules:
        assert path not in out, f"two rules make {path}"
        shape = transform.shape([tensors[name].shape for name in names])
        dtype = tensors[names[0]].dtype
        out[path] = jax.ShapeDtypeStruct(shape, np.float32 if is_fp8_scale(path, dtype) else dtype)
    return out


def is_fp8_scale(path: tuple, dtype: np.dtype) -> bool:
    return path[-1] == "scale" and dtype != np.uint8


@pytest.mark.parametrize("name", RELEASED)
def test_every_tensor_of_a_released_file_has_a_place_and_every_place_a_tensor(name):
    found, tensors = layout(name), headers(name)
    assert (found.leftovers, found.missing) == ([], [])
    used = [name for rule in found.rules for name in rule.names]
    assert len(used) == len(set(used)), "a tensor is used twice"
    assert {*used, *found.dropped} == {*tensors}
    found.check(name)


@pytest.mark.parametrize("name", RELEASED)
def test_the_parameters_are_as_many_as_published(name):
    arrays = made(layout(name), headers(name))
    count = 0
    for path, array in arrays.items():
        if path[-1] != "scale":
            count += prod(array.shape) * (2 if array.dtype == np.uint8 else 1)
    assert count == RELEASED[name][1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", RELEASED)
def test_what_the_rules_make_is_what_the_model_has(name):
    arrays = made(layout(name), headers(name))
    config = preset(name)
    model = nnx.eval_shape(lambda: build(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    params = dict(nnx.to_flat_state(nnx.state(model)))
    assert {path for path in arrays if path[-1] != "scale"} == params.keys()
    for path, param in params.items():
        scale = arrays.get((*path[:-1], "scale")) if path[-1] == "weight" else None
        if scale is None:
            assert arrays[path].shape == param.shape
        else:
            assert formats.logical_shape(arrays[path], scale) == param.shape


def test_what_is_quantised_shows_in_the_tensors_alone():
    kinds = {}
    for name in RELEASED:
        arrays = made(layout(name), headers(name))
        weights = {path[-2] for path in arrays if path[-1] == "scale"}
        kinds[name] = weights
        assert layout(name).quantized == bool(weights)
    assert kinds["gpt-oss-20b"] == kinds["gpt-oss-120b"] == {"gate_up", "down"}
    assert kinds["qwen3-coder-30b-a3b fp8"] == {"qkv", "out", "gate_up", "down"}
    assert not any(kinds[name] for name in ("llama-3.1-8b", "gemma-4-31b", "qwen3-coder-30b-a3b"))


def test_gemmas_other_towers_are_dropped_for_a_reason():
    dropped = layout("gemma-4-31b").dropped
    assert len(dropped) == 4
    assert {*dropped.values()} == {"only the text model is used"}
    text = {
        name.replace("language_model.", ""): info
        for name, info in headers("gemma-4-31b").items()
        if "language_model" in name
    }
    alone = target_layout(preset("gemma-4-31b"), text)
    alone.check("gemma4")
    assert not alone.dropped


@pytest.mark.parametrize("name", PRESETS)
def test_invented_tensors_are_those_of_the_released_file(name):
    config = PRESETS[name]
    tensors = target_tensors(config, released.BF16)
    target_layout(config, tensors).check(name)
    if name in ("llama-3.1-8b", "qwen3-coder-30b-a3b"):
        assert {n: info.shape for n, info in tensors.items()} == {
            n: info.shape for n, info in headers(name).items()
        }


def test_the_released_20b_head_has_a_place_for_every_tensor(tmp_path):
    tensors = released.aws_gpt_oss_20b_head()
    released.write_config(tmp_path, released.AWS_GPT_OSS_20B_HEAD)
    config = drafter_config(tmp_path, PRESETS["gpt-oss-20b"], set(tensors), fused_width=8640)
    assert (config.method, config.mask_token_id, config.taps) == ("peagle", 201020, None)
    found = head_layout(config, tensors)
    found.check("the head")
    assert {*found.dropped} == {"d2t", "t2d"}
    arrays = made(found, tensors)
    head = nnx.eval_shape(lambda: DraftHead(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    params = dict(nnx.to_flat_state(nnx.state(head)))
    assert {path: x.shape for path, x in arrays.items()} == {p: x.shape for p, x in params.items()}
    count = sum(prod(x.shape) for x in arrays.values())
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


REFUSED = {
    "fp8 without a scale": (
        "qwen3", lambda t: with_dtype(t, QKV, released.FP8), "weight_scale_inv nor its "
                                                             "weight_scale",
    ),
    "one of three quantised": (
        "qwen3",
        lambda t: with_dtype(t, QKV[:1], released.FP8) | scales_for(t, QKV[:1]),
        "both must be quantised or neither",
    ),
    "q in float32, k and v in bfloat16": (
        "qwen3",
        lambda t: with_dtype(t, QKV[:1], np.float32),
        r"q_proj.weight is float32 but .*k_proj.weight is bfloat16; .*\(float32 holds both "
        r"exactly\)",
    ),
    "q in bfloat16, k and v in float16": (
        "llama",
        lambda t: with_dtype(t, QKV[1:], np.float16),
        r"q_proj.weight is bfloat16 but .*k_proj.weight is float16; .*\(float32 holds both "
        r"exactly\)",
    ),
    "gate and up in two dtypes": (
        "gemma4",
        lambda t: with_dtype(t, ("up_proj.weight",), np.float64),
        r"gate_proj.weight is bfloat16 but .*up_proj.weight is float64; .*\(float64 holds both",
    ),
    "biases in two dtypes": (
        "gpt_oss",
        lambda t: with_dtype(t, ("v_proj.bias",), np.float16),
        "q_proj.bias is bfloat16 but .*v_proj.bias is float16",
    ),
    "one expert in another dtype": (
        "qwen3_moe",
        lambda t: with_dtype(t, ("experts.3.down_proj.weight",), np.float16),
        "experts.0.down_proj.weight is bfloat16 but .*experts.3.down_proj.weight is float16",
    ),
    "scales in two dtypes": (
        "qwen3",
        lambda t: with_dtype(t, QKV, released.FP8)
        | scales_for(t, QKV)
        | with_dtype(scales_for(t, QKV[:1]), ("scale",), released.BF16),
        "q_proj.weight_scale is bfloat16 but .*k_proj.weight_scale is float32",
    ),
    "one expert not quantised": (
        "qwen3_moe",
        lambda t: with_dtype(t, ("1.up_proj.weight",), released.FP8)
        | scales_for(t, ("1.up_proj.weight",)),
        "both must be quantised or neither",
    ),
    "a scale of another form": (
        "qwen3",
        lambda t: with_dtype(t, QKV, released.FP8) | scales_for(t, QKV, (5, 5)),
        r"scale of shape \(5, 5\) does not fit a weight",
    ),
    "scales that are no floats": (
        "qwen3",
        lambda t: with_dtype(t, QKV, released.FP8)
        | with_dtype(scales_for(t, QKV), ("scale",), np.int32),
        "an FP8 scale is a float",
    ),
    "another fp8": (
        "qwen3", lambda t: with_dtype(t, QKV, "float8_e5m2"), "is float8_e5m2; a weight",
    ),
    "int8": ("llama", lambda t: with_dtype(t, ("down_proj.weight",), np.int8), "is int8; a weight"),
    "a quantised lm_head": (
        "llama", lambda t: with_dtype(t, ("lm_head.weight",), released.FP8), "only the matrices of",
    ),
    "a quantised router": (
        "qwen3_moe",
        lambda t: with_dtype(t, ("gate.weight",), released.FP8),
        "only the matrices of",
    ),
    "fp8 experts in gpt-oss's form": (
        "gpt_oss", lambda t: with_dtype(t, ("down_proj",), released.FP8), "only the matrices of",
    ),
    "a norm of another width": (
        "llama",
        lambda t: t | {"model.norm.weight": replace(t["model.norm.weight"], shape=(33,))},
        r"model.norm.weight has shape \(33,\), the config says \(32,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_together_are_refused(case):
    family, change, message = REFUSED[case]
    config, tensors = tensors_of(family)
    with pytest.raises(CheckpointError, match=message):
        target_layout(config, change(tensors))
