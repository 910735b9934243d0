"""The measurement of loading, on a small model in the sizes of a real one's names."""

import json

import jax
import numpy as np
import pytest

from bench.__main__ import main
from bench.load_times import _verify
from peagle_jax.checkpoint import load_target
from peagle_jax.config import ConfigError
from peagle_jax.models.presets import PRESETS
from tests.convert.conftest import GOLDEN, TINY_MOE


def test_a_load_is_measured_beside_a_plain_read_and_cleared_away(tmp_path, monkeypatch):
    name = "qwen3-coder-30b-a3b"
    monkeypatch.setitem(PRESETS, name, TINY_MOE)
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    command = [
        "load-times",
        str(work),
        "--preset",
        f"{name}-fp8",
        "--out",
        str(out),
        "--sha",
        "abc",
        "--verify",
    ]
    assert main(command) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    for row in rows:
        assert row["weights"] == "fp8"
        assert row["verified"]
        assert row["seconds"] > row["order_seconds"] >= 0
        assert row["bytes"] > 1_000_000
        assert row["peak_anonymous_bytes"] >= row["anonymous_bytes_before"] > 0
    assert not work.exists()


def test_a_model_with_a_wrong_bit_is_named():
    folder = GOLDEN / "qwen3_moe-fp8"
    target = load_target(folder, dtype="bfloat16")
    _verify(target, folder)
    weight = target.layers[1].mlp.down.weight
    wrong = np.array(weight.get_value())
    wrong.reshape(-1).view(np.uint8)[5] ^= 1
    weight.set_value(jax.numpy.asarray(wrong))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down\.weight is not what"):
        _verify(target, folder)


def test_a_folder_in_use_is_not_overwritten(tmp_path, capsys):
    assert main(["load-times", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert tmp_path.exists()
