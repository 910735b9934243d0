"""Quantised files that look alike: loaded with the file's values, or refused by name."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.checkpoint import CheckpointError, load_head, load_target
from peagle_jax.checkpoint.target_json import target_config
from tests.checkpoint.test_loader import leaves
from tests.golden.folders import GOLDEN, config, tensors, written

CHANNEL, BLOCKS = "qwen3-fp8-channel", "qwen3_moe-fp8"
SCALE = "model.layers.1.self_attn.k_proj.weight_scale"


def assert_same(folder: Path, name: str) -> None:
    found, wanted = (leaves(load_target(one, dtype="float32")) for one in (folder, GOLDEN / name))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].dtype == value.dtype, path
        assert (np.asarray(found[path]) == np.asarray(value)).all(), path


@pytest.mark.parametrize(
    ("changes", "group", "rule"),
    [
        (dict(format="int-quantized"), {}, "format 'int-quantized' is not supported"),
        (dict(format="pack-quantized"), {}, "format 'pack-quantized' is not supported"),
        (dict(format="nvfp4-pack-quantized"), {}, "format 'nvfp4-pack-quantized' is not"),
        (dict(format="mixed-precision"), {}, "format 'mixed-precision' is not supported"),
        ({}, dict(num_bits=4), "group_0.weights: num_bits 4 is not supported, 8 is"),
        ({}, dict(type="int"), "group_0.weights: type 'int' is not supported"),
        ({}, dict(symmetric=False), "group_0.weights: symmetric False is not supported"),
        ({}, dict(strategy="group"), "group_0.weights: strategy 'group' is not supported"),
        ({}, dict(block_structure=[64, 64]), "group_0.weights: block_structure [64, 64] is not"),
        (dict(transform_config={"config_groups": {"R1": {}}}), {}, "transform_config"),
        (dict(sparsity_config={"format": "sparse-24-bitmask"}), {}, "'sparse-24-bitmask' is not"),
    ],
)
def test_formats_of_compressed_tensors_are_refused_by_name(changes, group, rule, tmp_path):
    """`float-quantized` with four bits, and an integer in eight, have tensors of known names."""
    raw = config(CHANNEL)
    raw["quantization_config"] |= changes
    raw["quantization_config"]["config_groups"]["group_0"]["weights"] |= group
    with pytest.raises(CheckpointError, match=f"quantization_config: .*{re.escape(rule)}"):
        load_target(written(tmp_path, raw, tensors(CHANNEL)), dtype="float32")


def test_every_group_of_compressed_tensors_is_looked_at(tmp_path):
    raw = config(CHANNEL)
    groups = raw["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    assert_same(written(tmp_path, raw, tensors(CHANNEL)), CHANNEL)
    groups["group_1"]["weights"]["num_bits"] = 4
    with pytest.raises(CheckpointError, match=r"group_1\.weights: num_bits 4"):
        load_target(written(tmp_path, raw, tensors(CHANNEL)), dtype="float32")
    groups["group_1"] = dict(groups["group_0"], format="nvfp4-pack-quantized")
    with pytest.raises(CheckpointError, match="group_1: format 'nvfp4-pack-quantized'"):
        load_target(written(tmp_path, raw, tensors(CHANNEL)), dtype="float32")


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_AWQ", "MIXED_PRECISION"])
def test_formats_of_modelopt_are_refused_by_name(algorithm, tmp_path):
    raw = config("llama-fp8-tensor")
    raw["quantization_config"] = dict(quant_method="modelopt", quant_algo=algorithm)
    with pytest.raises(CheckpointError, match=f"quant_algo '{algorithm}' is not supported"):
        load_target(written(tmp_path, raw, tensors("llama-fp8-tensor")), dtype="float32")


@pytest.mark.parametrize("name", [CHANNEL, BLOCKS, "llama-fp8-tensor"])
def test_scales_are_applied_without_a_quantization_config(name, tmp_path):
    raw = config(name)
    del raw["quantization_config"]
    assert_same(written(tmp_path, raw, tensors(name)), name)


def test_scales_of_rows_may_be_vectors(tmp_path):
    held = {
        n: x.reshape(-1) if n.endswith("weight_scale") else x for n, x in tensors(CHANNEL).items()
    }
    assert {x.ndim for n, x in held.items() if n.endswith("weight_scale")} == {1}
    assert_same(written(tmp_path, config(CHANNEL), held), CHANNEL)


@pytest.mark.parametrize("name", ["scale_weight", "weight_scale_2", "scales"])
def test_a_scale_of_another_name_is_refused(name, tmp_path):
    held = tensors(CHANNEL)
    held[SCALE.replace("weight_scale", name)] = held.pop(SCALE)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is FP8 but the file holds neither"):
        load_target(written(tmp_path, config(CHANNEL), held), dtype="float32")


def test_a_scale_without_an_fp8_weight_is_refused(tmp_path):
    held = tensors(CHANNEL)
    for part in "qkv":
        name = SCALE.replace("k_proj.weight_scale", f"{part}_proj.weight")
        held[name] = held[name].astype(np.float32)
    with pytest.raises(CheckpointError, match=r"without a place in qwen3: .*weight_scale"):
        load_target(written(tmp_path, config(CHANNEL), held), dtype="float32")


@pytest.mark.parametrize("name", [CHANNEL, BLOCKS, "llama-fp8-tensor"])
def test_a_scale_may_lie_in_another_file_than_its_weight(name, tmp_path):
    held = tensors(name)
    scales = {n: x for n, x in held.items() if "_scale" in n}
    rest = {n: x for n, x in held.items() if n not in scales}
    assert_same(written(tmp_path, config(name), scales, rest), name)


@pytest.mark.parametrize("padding", [((0, 1), (0, 0)), ((0, 0), (0, 1))])
def test_a_grid_of_scales_padded_past_the_last_block_is_refused(padding, tmp_path):
    held = tensors(BLOCKS)
    name = next(n for n, x in held.items() if n.endswith("weight_scale_inv") and x.size > 1)
    held[name] = np.pad(held[name], padding, constant_values=1)
    shape = re.escape(str(held[name].shape))
    with pytest.raises(CheckpointError, match=f"an FP8 scale of shape {shape} does not fit"):
        load_target(written(tmp_path, config(BLOCKS), held), dtype="float32")


def test_heads_are_refused_likewise(tmp_path):
    raw = config("peagle-1") | {"quantization_config": {"quant_method": "awq"}}
    folder, target = written(tmp_path, raw, tensors("peagle-1")), target_config(GOLDEN / "qwen3")
    with pytest.raises(CheckpointError, match="quant_method 'awq' is not supported"):
        load_head(folder, target, dtype="float32")
