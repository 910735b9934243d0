"""`peagle-bench prefix-cache`: warm prompts are found, cold ones computed, both give the same texts."""

import json
from dataclasses import replace

import pytest

from bench import presets
from bench.__main__ import main
from tests import tiny


@pytest.fixture
def tiny_preset(monkeypatch):
    wide = replace(tiny.TARGET, hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(presets.PRESETS, "tiny", wide)
    monkeypatch.setattr(presets, "PEAGLE_LAYERS", 1)


SMALL = [
    "--preset", "tiny", "--layers", "1", "--prompt-tokens", "40", "--chat-tokens", "96", "--turn-tokens", "8",
    "--max-tokens", "8", "--prefill-chunk", "32", "--chats", "3", "--concurrency", "2", "-K", "2", "--no-cache",
]  # fmt: skip


def test_a_row_has_both_measurements(tiny_preset, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["prefix-cache", *SMALL, "--methods", "none", "--out", str(out)]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["kind"], row["method"], row["chats"]) == ("prefix-cache", "none", 3)
    # 6 pages of the 112 tokens of a turn; 5 of a shared beginning, which ends with the sixth.
    assert row["turn_cached_share"] == pytest.approx(96 / 112, abs=1e-3)
    assert row["shared_cached_share"] == pytest.approx(80 / 104, abs=1e-3)
    assert row["turn_texts_equal"] == row["shared_texts_equal"] == 3
    assert min(value for name, value in row.items() if "_ms_" in name) > 0
    assert "86%" in capsys.readouterr().out


def test_texts_longer_than_the_context_are_refused(tiny_preset, tmp_path, capsys):
    argv = [*SMALL, "--chat-tokens", "600", "--out", str(tmp_path / "rows.jsonl")]
    assert main(["prefix-cache", *argv]) == 2
    assert "has 512 positions" in capsys.readouterr().err
