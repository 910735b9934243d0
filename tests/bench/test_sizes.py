"""Sizes of the presets against the official numbers, and the table in docs/models.md."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from bench import sizes
from bench.__main__ import main
from peagle_jax.models.presets import PRESETS
from tests import tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "billions", "form", "gigabytes"),
    [
        ("gpt-oss-20b", 20.915, "mxfp4", 13.8),  # parameters and file sizes of the model cards
        ("gpt-oss-120b", 116.829, "mxfp4", 65.2),
        ("qwen3-coder-30b-a3b", 30.532, "fp8", 31.2),
        ("gemma-4-31b", 30.697, "bf16", 61.4),
        ("llama-3.1-8b", 8.030, "bf16", 16.1),
    ],
)
def test_counts_are_the_official_ones(name, billions, form, gigabytes):
    weights = sizes.count(PRESETS[name])
    assert weights.total / 1e9 == pytest.approx(billions, abs=6e-4)
    assert weights.num_bytes(form) / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.sampled(4, slow=2)
@pytest.mark.parametrize("family", tiny.TARGETS)
def test_bytes_are_those_of_a_model(family):
    model = tiny.target(dtype="bfloat16", **tiny.TARGETS[family])
    held = sum(np.asarray(x).nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert sizes.count(model.config).num_bytes("bf16") == held


def test_a_window_bounds_the_cache():
    config = PRESETS["gemma-4-31b"]
    full = sum(2 * config.attention(i).num_kv_heads * config.attention(i).head_dim
               for i in range(60) if config.window(i) is None)  # fmt: skip
    longer = sizes.kv_bytes(config, 65536) - sizes.kv_bytes(config, 32768)
    assert longer == 32768 * 2 * full


@pytest.mark.slow
def test_the_documented_rows_are_among_those_the_command_prints(capsys):
    assert main(["sizes"]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = page.partition("| model | parameters")[2].splitlines()[2:]
    assert rows
    assert set(rows) <= set(printed)
