"""`peagle-bench headroom` on a tiny random model, and its counts on made-up heads."""

import json

import numpy as np
import pytest

from bench import headroom
from bench.__main__ import main
from bench.headroom import Measured, summary
from peagle_jax import Engine, EngineConfig, SamplingParams
from peagle_jax.training.acceptance import earlier
from peagle_jax.training.stored_text import Text
from tests import tiny
from tests.programs import one_bucket


@pytest.fixture
def few_prompts(tmp_path):
    file = tmp_path / "few.jsonl"
    prompts = ("def f(x):", "def quicksort(xs): return", "x = 1")
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return f"few={file}"


@pytest.mark.exhaustive
def test_every_head_gets_a_row_and_texts_are_written_once(
    folders, tmp_path, few_prompts, monkeypatch, capsys
):
    out = tmp_path / "rows.jsonl"
    argv = ["headroom", "--model", folders.target, "--drafter", folders.eagle3, "--drafter",
            folders.peagle, "--sets", few_prompts, "-K", "3", "--max-tokens", "12", "--ignore-eos",
            "--max-model-len", "128", "--texts", tmp_path / "texts", "--out", out, "--no-cache",
            "--sha", "abc"]  # fmt: skip
    argv = [str(item) for item in argv]
    assert main(argv) == 0
    assert "hybrid" in capsys.readouterr().out
    measured = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in measured] == ["eagle3", "peagle"]
    for row in measured:
        assert row["texts"] == 3
        assert row["tokens"] == 36
        assert sum(row["accepted_histogram"]["all"]) == row["rounds"]
        assert sum(map(len, row["accepted_by_text"])) == row["rounds"]
        oracle = list(row["oracle_acceptance_length"].values())
        assert oracle == sorted(oracle)
        assert oracle[0] == row["acceptance_length"]
        assert all(a <= b for a, b in zip(row["recall"]["1"], row["recall"]["16"], strict=True))
    written_again = lambda *given: pytest.fail("texts that are kept are not written again")
    monkeypatch.setattr(headroom, "greedy_texts", written_again)
    assert main(argv) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_right_drafts_are_those_that_the_engine_accepts(method):
    """A random head guesses one of eight tokens now and then."""
    target = tiny.target(vocab_size=8)
    mask = 1 if method == "peagle" else None
    head = tiny.head(method, vocab_size=8, draft_vocab_size=8, mask_token_id=mask)
    config = EngineConfig(num_draft=3, max_num_seqs=4, max_model_len=128, max_logprobs=8)
    prompts = [[2 + i, 7, 3, 4 + i % 2] for i in range(4)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    done = one_bucket(Engine(target, head, config)).generate(prompts, params)
    tokens = np.array([[*one.prompt, *one.tokens] for one in done])
    text = Text(tokens, np.full(4, 4, np.int32), np.full(4, 44, np.int32))
    found = headroom.measure(target, head, text, num_draft=3, dtype="float32", bucket=16)
    rounds = found.walk()
    for i, one in enumerate(done):
        mine = int(rounds.accepted[rounds.text == i].sum())
        # The engine's last round may accept drafts beyond the last token that it emits.
        assert abs(one.accepted - mine) <= 3
    assert rounds.accepted.sum() > 0


def test_summary_counts_what_a_made_up_head_does():
    tokens = np.array([[*range(10, 22)]])
    text = Text(tokens, np.array([2]), np.array([12]))
    rank = np.zeros((1, 2, 12), int)
    rank[0, 1, :] = 3  # the second draft is always the fourth choice
    found = Measured(text, [earlier(tokens[0])], rank, np.full((1, 2, 12), 0.75, np.float32))
    row = summary(found)
    assert row["acceptance_length"] == 9 / 5
    assert row["fresh_acceptance_length"] == row["acceptance_length"]
    assert row["repeat_share"] == 0
    assert row["oracle_acceptance_length"][4] == 3.0
    assert row["recall"][2] == [1.0, 0.0]
    assert row["recall"][4] == [1.0, 1.0]
    assert row["accepted_histogram"]["all"] == [1, 4, 0]
    assert row["calibration_error"] == pytest.approx([0.25, 0.75])
    assert row["ngram"]["acceptance_length"] == 1.0
