"""`peagle-bench prefix-cache`: warm prompts are found, cold ones computed, both give the same texts."""

import json
from dataclasses import replace

import pytest

from bench import presets
from bench.__main__ import main
from bench.page_bits import Place, written_twice
from peagle_jax import Engine, EngineConfig
from tests import tiny
from tests.programs import one_bucket


@pytest.fixture
def tiny_preset(monkeypatch):
    wide = replace(tiny.TARGET, hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(presets.PRESETS, "tiny", wide)
    monkeypatch.setattr(presets, "PEAGLE_LAYERS", 1)


SMALL = [
    "--preset", "tiny", "--layers", "1", "--prompt-tokens", "40", "--chat-tokens", "96", "--turn-tokens", "8",
    "--max-tokens", "8", "--prefill-chunk", "32", "--chats", "2", "--requests", "3", "--shared-tokens", "96", "--concurrency", "2",
    "-K", "2", "--no-cache",
]  # fmt: skip


@pytest.mark.slow
def test_a_row_has_both_measurements(tiny_preset, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    sizes = ["--max-tokens", "40", "--out", str(out)]
    assert main(["prefix-cache", *SMALL, "--methods", "none,peagle", *sizes]) == 0
    row, drafted = map(json.loads, out.read_text().splitlines())
    assert (row["kind"], row["method"], row["chats"]) == ("prefix-cache", "none", 2)
    # 8 pages of the 144 tokens of a turn; 5 of a shared beginning, which ends with the sixth.
    assert row["turn_cached_share"] == pytest.approx(128 / 144, abs=1e-3)
    assert row["shared_cached_share"] == pytest.approx(80 / 104, abs=1e-3)
    assert (row["turn_texts_equal"], row["shared_texts_equal"]) == (2, 3)
    assert min(value for name, value in row.items() if "_ms_" in name) > 0
    assert "89%" in capsys.readouterr().out
    assert row["acceptance_length"] == 1 < 1.3 < drafted["acceptance_length"]  # K = 2
    # One whole page of output of two texts, keys and values of one layer; the head has a layer too.
    assert (row["pages_compared"], drafted["pages_compared"]) == (4, 8)
    assert row["plain_pages_compared"] == drafted["plain_pages_compared"] == 4
    assert drafted["plain_pages_differing"] is not None


@pytest.fixture
def engine():
    config = EngineConfig(num_draft=2, max_num_seqs=2, max_model_len=64, prefill_chunk=16)
    return one_bucket(Engine(tiny.target(), tiny.head("peagle"), config))


def test_pages_that_differ_are_counted_and_named(engine):
    prompts = [list(range(5, 25)), list(range(9, 29))]
    by_rounds, by_prefill = written_twice(engine, prompts, 30)
    size = engine.config.page_size
    assert by_rounds.count("target") == 2 * 2 * tiny.TARGET.num_layers * (49 // size - 2)
    assert by_rounds.differing(by_rounds) == []
    place = Place("drafter", 1, 0, "v", 2)
    bits = by_rounds.pages[place].copy()
    bits[3, 5] ^= 1
    changed = replace(by_rounds, pages=by_rounds.pages | {place: bits})
    assert changed.differing(by_rounds) == [
        f"drafter layer 0 v of text 1: positions {2 * size + 3}"
    ]
    plain = {one: bits for one, bits in by_rounds.pages.items() if one.model == "target"}
    assert changed.differing(replace(by_rounds, pages=plain)) == []


def test_texts_longer_than_the_context_are_refused(tiny_preset, tmp_path, capsys):
    argv = [*SMALL, "--chat-tokens", "600", "--out", str(tmp_path / "rows.jsonl")]
    assert main(["prefix-cache", *argv]) == 2
    assert "has 512 positions" in capsys.readouterr().err
