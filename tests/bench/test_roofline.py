"""The floor model against figures worked out by hand for Llama 3.1 8B on an H200."""

import pytest

from bench.roofline import CHIPS, Load, fraction, round_seconds
from peagle_jax.config import DrafterConfig, RopeConfig
from peagle_jax.presets import PRESETS

CHIP = CHIPS["NVIDIA H200"]
TARGET = PRESETS["llama-3.1-8b"]


def head(method: str, layers: int) -> DrafterConfig:
    return DrafterConfig(
        method=method, vocab_size=128256, draft_vocab_size=32000, hidden_size=4096,
        target_hidden_size=4096, num_layers=layers, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14336, norm_eps=1e-5, rope=RopeConfig(theta=5e5),
        mask_token_id=1 if method == "peagle" else None,
    )  # fmt: skip


def load(batch: int, num_draft: int) -> Load:
    return Load(batch=batch, context=1024, num_draft=num_draft, accepted=2.0, dtype="bfloat16")


@pytest.mark.parametrize(
    ("batch", "num_draft", "milliseconds"), [(1, 0, 3.52), (32, 0, 4.49), (1, 7, 3.52)]
)
def test_a_target_pass_is_bound_by_its_weights(batch, num_draft, milliseconds):
    """15.0 GB of matrices (all but the embedding) and 134 MB of KV a sequence at 4.3 TB/s."""
    seconds = round_seconds(TARGET, None, load(batch, num_draft), CHIP)
    assert 1000 * seconds == pytest.approx(milliseconds, rel=0.01)


def test_parallel_drafting_is_one_pass_and_eagle_is_one_a_draft():
    target = round_seconds(TARGET, None, load(1, 7), CHIP)
    extra = lambda method, layers: (
        round_seconds(TARGET, head(method, layers), load(1, 7), CHIP) - target
    )
    # Weights read: fc 50 M, layer 0 252 M, each further layer 218 M, lm_head 131 M.
    assert extra("peagle", 4) == pytest.approx(
        2 * (50 + 252 + 3 * 218 + 131) * 1e6 / 4.3e12, rel=0.02
    )
    assert extra("eagle3", 1) == pytest.approx(2 * (50 + 7 * (252 + 131)) * 1e6 / 4.3e12, rel=0.02)


def test_an_unknown_device_has_no_floor():
    assert fraction({"device": "a toaster"}, TARGET, None)["fraction_of_floor"] is None


def test_what_is_not_counted_has_no_floor():
    row = {"device": "NVIDIA H200", "dtype": "bfloat16", "weights": "fp8"}
    assert fraction(row, TARGET, None)["fraction_of_floor"] is None
    row["weights"] = "bfloat16"
    assert fraction(row, PRESETS["gpt-oss-20b"], None)["fraction_of_floor"] is None
