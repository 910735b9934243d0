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
    round_cost,
    target_cost,
)
from peagle_jax.config import DrafterConfig
from peagle_jax.presets import PRESETS
from peagle_jax.rope_config import RopeConfig

CHIP = CHIPS["NVIDIA H200"]
TARGET = PRESETS["llama-3.1-8b"]


def head(method: str, layers: int) -> DrafterConfig:
    sizes = dict(vocab_size=128256, draft_vocab_size=32000, hidden_size=4096, head_dim=128)
    sizes |= dict(target_hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14336)
    mask = 1 if method == "peagle" else None
    rules = dict(method=method, norm_eps=1e-5, rope=RopeConfig(theta=5e5), mask_token_id=mask)
    return DrafterConfig(num_layers=layers, **sizes, **rules)


def load(batch: int, num_draft: int) -> Load:
    return Load(batch=batch, context=1024, num_draft=num_draft, accepted=2.0, dtype="bfloat16")


def seconds_of(drafter: DrafterConfig | None, one: Load) -> float:
    """Floor of a round."""
    return round_cost(TARGET, drafter, one).seconds(CHIP, one.dtype)


@pytest.mark.parametrize(
    ("batch", "num_draft", "milliseconds"), [(1, 0, 3.52), (32, 0, 4.49), (1, 7, 3.52)]
)
def test_a_target_pass_is_bound_by_its_weights(batch, num_draft, milliseconds):
    """15.0 GB of matrices (all but the embedding) and 134 MB of KV a sequence at 4.3 TB/s."""
    seconds = seconds_of(None, load(batch, num_draft))
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.01)


def test_parallel_drafting_is_one_pass_and_eagle_is_one_a_draft():
    target = seconds_of(None, load(1, 7))
    extra = lambda method, layers: seconds_of(head(method, layers), load(1, 7)) - target
    # Weights read: fc 50 M, layer 0 252 M, each further layer 218 M, lm_head 131 M.
    assert extra("peagle", 4) == pytest.approx(
        2 * (50 + 252 + 3 * 218 + 131) * 1e6 / 4.3e12, rel=0.02
    )
    assert extra("eagle3", 1) == pytest.approx(2 * (50 + 7 * (252 + 131)) * 1e6 / 4.3e12, rel=0.02)


def test_an_unknown_device_has_no_floor():
    assert fraction({"device": "a toaster"}, TARGET, None)["fraction_of_floor"] is None


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
