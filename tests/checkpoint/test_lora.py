"""Adapters of peft that are merged at load, and those that are refused."""

import jax
import numpy as np
import pytest

from convert.__main__ import main as convert
from peagle_jax.checkpoint import load_target, save_target
from peagle_jax.checkpoint.safetensors import Checkpoint, CheckpointError, write
from peagle_jax.devices import Devices
from tests import adapters, tiny


def save(folder, family="llama", dtype="bfloat16"):
    windows = dict(sliding_windows=(6, 6, None)) if family == "gemma4" else {}
    save_target(tiny.target(**tiny.FAMILIES[family] | windows), folder, dtype=dtype)
    return folder


def check_equal(one, other):
    leaves, structure = jax.tree.flatten(one)
    expected, same = jax.tree.flatten(other)
    assert structure == same
    for leaf, want in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(want))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gpt_oss", "gemma4"])
def test_a_merged_target_is_the_one_that_was_merged_by_hand(tmp_path, family):
    base = save(tmp_path / "base", family)
    modules = adapters.modules_of(base)
    assert len(modules) >= 6
    products = adapters.save_adapter(tmp_path / "lora", modules)
    deltas = {name: np.float32(0.5) * product for name, product in products.items()}
    adapters.save_merged(base, tmp_path / "merged", deltas)
    merged = load_target(base, dtype="float32", lora=tmp_path / "lora")
    check_equal(merged, load_target(tmp_path / "merged", dtype="float32"))
    plain = load_target(base, dtype="float32")
    assert any(
        not np.array_equal(*pair)
        for pair in zip(jax.tree.leaves(merged), jax.tree.leaves(plain), strict=True)
    )


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (dict(use_rslora=True), lambda name: 2 / 4**0.5),
        (dict(fan_in_fan_out=True, lora_alpha=6.0), lambda name: 6 / 4),
        (
            dict(alpha_pattern={r"layers\.1\..*q_proj": 8, "q_proj": 4}),
            lambda name: (8 if "1.self_attn.q_" in name else 4 if "q_proj" in name else 2) / 4,
        ),
        (dict(rank_pattern={".*proj": 4}, r=64), lambda name: 2 / 4),
    ],
)
def test_the_factor_is_that_of_peft(tmp_path, config, factor):
    base = save(tmp_path / "base", dtype="float32")
    products = adapters.save_adapter(tmp_path / "lora", adapters.modules_of(base), **config)
    deltas = {name: np.float32(factor(name)) * one for name, one in products.items()}
    adapters.save_merged(base, tmp_path / "merged", deltas)
    check_equal(
        load_target(base, dtype="float32", lora=tmp_path / "lora"),
        load_target(tmp_path / "merged", dtype="float32"),
    )


def test_targets_that_are_quantised_converted_or_shared_are_merged_first(tmp_path, capsys):
    base = save(tmp_path / "base")
    products = adapters.save_adapter(tmp_path / "lora", adapters.modules_of(base))
    deltas = {name: np.float32(0.5) * product for name, product in products.items()}
    adapters.save_merged(base, tmp_path / "merged", deltas)
    assert convert(["convert", str(base), str(tmp_path / "converted")]) == 0
    for folder, options in (
        (base, dict(quantization="fp8")),
        (base, dict(devices=Devices(2))),
        (tmp_path / "converted", {}),
    ):
        merged = load_target(folder, dtype="bfloat16", lora=tmp_path / "lora", **options)
        check_equal(merged, load_target(tmp_path / "merged", dtype="bfloat16", **options))


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (dict(use_dora=True), "use_dora cannot be merged"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save cannot be merged"),
        (dict(trainable_token_indices=[3]), "trainable_token_indices"),
        (dict(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters"),
        (dict(layer_replication=[[0, 2]]), "layer_replication"),
        (dict(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
        (dict(something_new={"a": 1}), "something_new"),
        (dict(bias="all"), "bias 'all'"),
        (dict(peft_type="LOHA"), "peft_type 'LOHA'"),
        (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
        (dict(rank_pattern={"(": 4}), "no regular expression"),
        (dict(rank_pattern={"q_proj": "4"}), "q_proj must be a whole number"),
        (dict(alpha_pattern=[4]), "alpha_pattern must be an object"),
        (dict(lora_alpha=float("nan")), "lora_alpha must be a finite number"),
        (dict(r=0), "r must be a whole number"),
        (dict(r=8), "rank 8 needs (8, 32)"),
    ],
)
def test_configs_that_cannot_be_merged_are_refused_by_name(tmp_path, config, part):
    base = save(tmp_path / "base")
    adapters.save_adapter(tmp_path / "lora", adapters.modules_of(base), **config)
    with pytest.raises(CheckpointError) as caught:
        load_target(base, dtype="float32", lora=tmp_path / "lora")
    assert part in str(caught.value)


Q = "model.layers.0.self_attn.q_proj"


def pair(module, rows=32, columns=32, rank=4, dtype=np.float32):
    return {
        f"base_model.model.{module}.lora_A.weight": np.ones((rank, columns), dtype),
        f"base_model.model.{module}.lora_B.weight": np.ones((rows, rank), dtype),
    }


REFUSED = {
    "shapes": (pair(Q, columns=31), [Q, "(4, 31)", "(4, 32)"]),
    "transposed": (pair("model.layers.0.mlp.up_proj", 32, 48), ["up_proj", "needs"]),
    "all of several": (pair(Q, 31) | pair("model.layers.9.self_attn.q_proj"), [Q, "layers.9"]),
    "unknown": (pair("model.vision_tower.layers.0.q_proj"), ["no linear layer"]),
    "embedding": (pair("model.embed_tokens", 128), ["is the embedding"]),
    "norm": (pair("model.layers.0.input_layernorm"), ["no linear layer"]),
    "integers": (pair(Q, dtype=np.int32), ["int32, not a float"]),
    "not finite": (
        pair(Q) | {f"base_model.model.{Q}.lora_A.weight": np.full((4, 32), np.nan, np.float32)},
        ["128 NaN"],
    ),
    "alone": (dict([*pair(Q).items()][:1]), ["without its lora_A or lora_B", "lora_A"]),
    "nothing": ({}, ["holds no lora_A"]),
    "DoRA": ({f"base_model.model.{Q}.lora_magnitude_vector.weight": np.ones(32)}, ["DoRA"]),
    "embeddings": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9))},
        ["LoRA of embeddings"],
    ),
    "whole": ({"base_model.model.lm_head.weight": np.ones((128, 32))}, ["saved whole", "lm_head"]),
    "bias": ({f"base_model.model.{Q}.lora_B.bias": np.ones(32)}, ["lora_bias"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_cannot_be_merged_are_refused_by_name(tmp_path, what):
    tensors, parts = REFUSED[what]
    base = save(tmp_path / "base")
    adapters.save_files(tmp_path / "lora", tensors, r=4)
    with pytest.raises(CheckpointError) as caught:
        load_target(base, dtype="float32", lora=tmp_path / "lora")
    assert str(tmp_path / "lora") in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_experts_tied_heads_and_quantised_weights_are_refused(tmp_path):
    experts = pair("model.layers.0.mlp.experts.0.up_proj", 48)
    adapters.save_files(tmp_path / "experts", experts, r=4)
    adapters.save_files(tmp_path / "head", pair("lm_head", 128), r=4)
    adapters.save_files(tmp_path / "q", pair(Q), r=4)
    quantised = save(tmp_path / "llama")
    checkpoint = Checkpoint(quantised)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj"
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].astype("float8_e4m3fn")
        tensors[f"{name}.weight_scale_inv"] = np.ones((1, 1), np.float32)
    write(quantised / "model.safetensors", tensors)
    for base, lora, part in (
        (save(tmp_path / "moe", "qwen3_moe"), "experts", "is of experts"),
        (save(tmp_path / "tied", "qwen2"), "head", "tied to it"),
        (quantised, "q", "merge it before the target is quantised"),
    ):
        with pytest.raises(CheckpointError, match=part):
            load_target(base, dtype="float32", lora=tmp_path / lora)
    untied = save(tmp_path / "untied")
    merged = load_target(untied, dtype="float32", lora=tmp_path / "head")
    weight = np.asarray(Checkpoint(untied).read("lm_head.weight"), np.float32)
    np.testing.assert_allclose(np.asarray(merged.lm_head.weight), weight + 2, atol=0.02)


def test_folders_that_hold_no_adapter(tmp_path):
    base = save(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        load_target(base, dtype="float32", lora=base)
    adapters.save_files(tmp_path / "lora", pair(Q), r=4)
    (tmp_path / "lora" / "adapter_model.safetensors").rename(
        tmp_path / "lora" / "adapter_model.bin"
    )
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        load_target(base, dtype="float32", lora=tmp_path / "lora")


def test_a_sum_that_the_dtype_cannot_hold_is_refused(tmp_path):
    base = save(tmp_path / "base", dtype="float16")
    adapters.save_files(tmp_path / "lora", pair(Q), r=4, lora_alpha=1e6)
    with pytest.raises(CheckpointError, match="exceeds float16"):
        load_target(base, dtype="float32", lora=tmp_path / "lora")
