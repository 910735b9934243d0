"""A converted folder loads into the same arrays as the folder it was made from."""

from pathlib import Path

import jax
import numpy as np
import pytest

from convert.__main__ import main
from peagle_jax.checkpoint import load_head, load_target

GOLDEN = Path(__file__).parents[1] / "golden"
TARGETS = ("gpt_oss-mxfp4", "gpt_oss-bf16", "qwen3_moe-fp8", "llama-fp8-tensor", "gemma4", "qwen3")


def assert_same_arrays(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", TARGETS)
def test_targets(tmp_path, capsys, name):
    assert main(["convert", str(GOLDEN / name), str(tmp_path / "dst")]) == 0
    loaded = load_target(tmp_path / "dst", dtype="float32")
    assert_same_arrays(loaded, load_target(GOLDEN / name, dtype="float32"))


@pytest.mark.parametrize("name", ["peagle-pruned", "eagle31"])
def test_heads(tmp_path, capsys, name):
    target = load_target(GOLDEN / "qwen3", dtype="float32").config
    options = ["--target", str(GOLDEN / "qwen3")]
    assert main(["convert", str(GOLDEN / name), str(tmp_path / "dst"), *options]) == 0
    loaded = load_head(tmp_path / "dst", target, dtype="float32")
    assert_same_arrays(loaded, load_head(GOLDEN / name, target, dtype="float32"))
