"""The floor model on an H200, against figures worked out by hand and a second model."""

from dataclasses import replace

import pytest

from bench.presets import preset
from lab.roofline import (
    CHIPS,
    Load,
    drafter_cost,
    experts_read,
    fraction,
    target_cost,
)
from peagle_jax.presets import PRESETS

CHIP = CHIPS["NVIDIA H200"]


def load(batch: int, num_draft: int) -> Load:
    return Load(batch=batch, context=1024, num_draft=num_draft, accepted=2.0, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "batch", "num_draft", "milliseconds"),
    [
        ("gpt-oss-20b", 1, 0, 0.869),
        ("gpt-oss-20b", 8, 7, 2.984),
        ("gpt-oss-120b", 1, 7, 3.912),
        ("gpt-oss-120b", 32, 0, 10.086),
        ("qwen3-coder-30b-a3b", 8, 3, 12.535),
        ("qwen3-coder-30b-a3b-fp8", 1, 7, 3.104),
        ("qwen3-coder-30b-a3b-fp8", 32, 0, 6.999),
        ("gemma-4-31b", 8, 0, 15.996),
        ("gemma-4-31b-fp8", 32, 0, 14.342),
        ("llama-3.1-8b-fp8", 8, 7, 2.120),
        ("llama-3.1-8b", 32, 11, 7.557),  # bound by arithmetic
    ],
)
def test_verify_passes_of_full_size_models(name, batch, num_draft, milliseconds):
    """Figures of an independent model that also counts biases and norms; context 1024."""
    model = preset(name)
    some = replace(load(batch, num_draft), weights=model.weights)
    seconds = target_cost(model.target, some).seconds(CHIP, some.dtype)
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.003)


def test_a_dense_layer_between_sparse_ones_is_read_whole():
    sparse = PRESETS["qwen3-coder-30b-a3b"]
    experts = replace(sparse.experts, dense_layers=(0,), dense_size=5472)
    bytes_of = lambda config: target_cost(config, load(1, 0)).bytes
    D, chosen, router = 2048, 8 * 768, 128
    saved = bytes_of(sparse) - bytes_of(replace(sparse, experts=experts))
    assert saved == pytest.approx(2 * D * (3 * (chosen - 5472) + router))


@pytest.mark.parametrize(
    ("name", "method", "batch", "milliseconds"),
    [
        ("gpt-oss-20b", "peagle", 1, 0.570),
        ("gpt-oss-20b", "peagle", 32, 0.820),
        ("qwen3-coder-30b-a3b-fp8", "peagle", 32, 0.493),
        ("qwen3-coder-30b-a3b-fp8", "eagle3", 1, 0.564),
        ("qwen3-coder-30b-a3b-fp8", "dflash", 1, 0.373),
        ("llama-3.1-8b", "eagle3", 32, 1.463),
    ],
)
def test_drafting_with_seven_drafts(name, method, batch, milliseconds):
    cost = drafter_cost(preset(name).head(method), load(batch, 7))
    assert 1000 * cost.seconds(CHIP, "bfloat16") == pytest.approx(milliseconds, rel=0.003)


def test_experts_read_grow_to_all_of_them():
    assert experts_read(128, 8, 1) == pytest.approx(8)
    assert experts_read(128, 8, 8) == pytest.approx(51.6, abs=0.05)
    assert experts_read(32, 4, 256) == pytest.approx(32)


def test_a_row_gets_its_floor_whatever_its_weights():
    model = preset("qwen3-coder-30b-a3b-fp8")
    row = dict(device="NVIDIA H200", dtype="bfloat16", weights="fp8", concurrency=8, prompts=8)
    row |= dict(prompt_tokens=8 * 768, max_tokens=512, num_speculative_tokens=0)
    row |= dict(acceptance_length=1.0, ms_per_round=6.536)
    found = fraction(row, model.target, None)
    assert found["floor_ms"] == pytest.approx(3.268, rel=0.001)
    assert found["fraction_of_floor"] == pytest.approx(0.5, rel=0.001)
    assert found["bytes_per_second"] == pytest.approx(14.05e9 / 6.536e-3, rel=0.001)
