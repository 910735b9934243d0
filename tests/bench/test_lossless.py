"""Losslessness as measured: drafts are accepted, and a difference is found."""

import functools
import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from bench import presets
from bench.__main__ import main
from bench.lossless import first_difference
from peagle_jax import Engine
from peagle_jax.method.verify import Verdict, verify
from tests import tiny

TINY = ["--layers", "1", "--prefill-chunk", "16", "--prompt-tokens", "40"]
TINY += ["--max-tokens", "24", "--no-cache", "--sha", "abc"]


@pytest.fixture
def tiny_preset(monkeypatch):
    """ "tiny" and "tiny-fp8"."""
    wide = replace(tiny.TARGET, hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(presets.PRESETS, "tiny", wide)
    monkeypatch.setattr(presets, "PEAGLE_LAYERS", 1)


def measured(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_texts_are_compared_while_k_changes(tiny_preset, tmp_path):
    out = tmp_path / "rows.jsonl"
    argv = ["--preset", "tiny", *TINY, "--out", str(out), "--methods", "peagle", "-K", "3"]
    argv += ["--adaptive", "load", "--concurrency", "16"]
    assert main(["lossless", *argv, "--tokens", "2000"]) == 0
    found = measured(out)
    (row,) = found
    assert (row["adaptive"], row["tokens_differing"]) == ("load", 0)
    assert row["choices"] > 3


def accept_one_too_many(logits, drafts, draft_probs, positions, *rest) -> Verdict:
    """The engine's rule, but for a wrong draft that gets through now and then."""
    verdict = verify(logits, drafts, draft_probs, positions, *rest)
    J = drafts.shape[1]
    wrong = (verdict.count <= J) & (positions[:, 0] % 5 == 0)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    slip = wrong[:, None] & (jnp.arange(J + 1) == verdict.count[:, None] - 1)
    return Verdict(jnp.where(slip, padded, verdict.tokens), verdict.count)


@pytest.mark.slow
def test_a_wrong_draft_that_is_accepted_is_found_out(tiny_preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "bench.lossless.Engine", functools.partial(Engine, accept=accept_one_too_many)
    )
    out = tmp_path / "rows.jsonl"
    argv = ["--preset", "tiny", *TINY, "--out", str(out), "--methods", "none,peagle", "-K", "3"]
    assert main(["lossless", *argv, "--concurrency", "1,2", "--tokens", "500"]) == 1
    plain, *drafting = measured(out)
    assert plain["tokens_differing"] == 0
    for row in drafting:
        assert 0 < row["texts"] - row["texts_equal"] <= len(row["parted_at"])
        text, place = row["parted_at"][0]
        assert 0 <= text < row["texts"]
        assert row["tokens_differing"] >= 24 - place
    assert "tokens differ" in capsys.readouterr().err


def test_from_the_first_difference_on_a_text_is_another():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "gpt-5"], "known are"),
        (["--preset", "tiny", "--max-tokens", "500"], "512 positions"),
        (["--preset", "tiny", "-K", "200"], "above 32"),
        (["--preset", "tiny", "--layers", "9"], "has 3"),
        (["--preset", "tiny", "--methods", "none", "--concurrency", "2"], "nothing to compare"),
    ],
)
def test_mistakes_are_reported(tiny_preset, argv, message, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["lossless", *argv, "--no-cache", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
