"""The measurement of loading, on a small model in the sizes of a real one's names."""

import json

import pytest

from bench.__main__ import main
from peagle_jax.presets import PRESETS
from tests.convert.conftest import TINY_MOE


@pytest.mark.parametrize("options", [[], ["--converted"]])
def test_a_load_is_measured_beside_a_plain_read_and_cleared_away(tmp_path, monkeypatch, options):
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
    ]
    assert main([*command, *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    for row in rows:
        assert row["weights"] == "fp8"
        assert row["converted"] == bool(options)
        assert row["seconds"] > row["order_seconds"] >= 0
        assert row["bytes"] > 1_000_000
        assert row["peak_anonymous_bytes"] >= row["anonymous_bytes_before"] > 0
    assert not work.exists()


def test_a_folder_in_use_is_not_overwritten(tmp_path, capsys):
    assert main(["load-times", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert tmp_path.exists()
