"""Load on a service: what is sent, the figures, and a run against a real server."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.load_clients import Outcome, figures, percentiles
from bench.serve_load import Options, calls
from serving.protos import peagle_v1_pb2 as pb


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(code: str = "OK", *, ttft: float = 0.1, per_token: float = 0.01, tokens: int = 11):
    """A request sent at 100 s."""
    first = 100 + ttft
    counts = dict(rounds=5, emitted=10, drafted=14, accepted=6)
    counts |= dict(accepted_per_position=[4, 2, 0], drafted_per_position=[5, 5, 4])
    times = dict(sent=100.0, first=first, last=first + per_token * (tokens - 1))
    return Outcome(code=code, tokens=[5] * tokens, acceptance=pb.Acceptance(**counts), **times)


def test_latencies_count_tokens_not_messages():
    one = outcome()
    assert one.latency("ttft") == pytest.approx(100)
    assert one.latency("tpot") == pytest.approx(10)
    assert one.latency("e2e") == pytest.approx(200)
    assert outcome(tokens=1).latency("tpot") is None
    assert Outcome(sent=1.0).latency("ttft") is None


def test_percentiles_are_those_of_the_values():
    assert percentiles([]) is None
    assert percentiles(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_figures_are_of_what_ended_well_and_goodput_of_what_was_in_time():
    slow, late = outcome(per_token=0.1), outcome(ttft=0.6)
    cancelled = outcome("CANCELLED", ttft=9.0, tokens=3)
    refused = Outcome(sent=100.0, code="RESOURCE_EXHAUSTED")
    limits = {"ttft": 500.0, "tpot": 50.0}
    row = figures([outcome(), outcome(), slow, late, cancelled, refused], 2.0, limits)
    assert row["codes"] == {"CANCELLED": 1, "OK": 4, "RESOURCE_EXHAUSTED": 1}
    assert (row["requests"], row["tokens"]) == (6, 47)
    assert row["tokens_per_second"] == 23.5
    assert row["requests_per_second"] == 2.0
    assert row["goodput"] == 1.0
    assert row["ttft_ms"]["p99"] < 1000  # not of the cancelled one
    assert row["acceptance_length"] == pytest.approx(10 / 5)
    assert row["acceptance_per_position"] == [0.8, 0.4, 0.0]
    assert "goodput" not in figures([outcome()], 1.0, {})


@pytest.fixture
def options() -> Options:
    return Options(seed=3, max_tokens=8, ignore_eos=True)


def test_arrivals_are_poisson_from_the_seed(options):
    made = calls(options, ["a", [5, 6]], 2000, rate=50.0)
    again = calls(options, ["a", [5, 6]], 2000, rate=50.0)
    assert [call.start for call in made] == [call.start for call in again]
    gaps = np.diff([call.start for call in made])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)  # an exponential's, as its mean
    assert made[0].request.text == "a"
    assert list(made[1].request.tokens.ids) == [5, 6]


@pytest.fixture
def tiny_server(folders, monkeypatch, tmp_path):
    """Options that make `serve-load` start a server of the tiny model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    sizes = ["--max-model-len", "256", "--prefill-chunk", "16", "--num-speculative-tokens", "3"]
    return ["--", *folders.options(), *sizes]


@pytest.mark.exhaustive
def test_a_load_ends_every_request(tiny_server, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    argv = (
        "--concurrency 1,2 --set random --prompt-tokens 20 --max-tokens 16 --num-requests 40"
        " --goodput ttft:60000 --ignore-eos --sha abc"
        f" --no-cache --out {out}"
    ).split()
    assert main(["serve-load", *argv, *tiny_server]) == 0
    found = read(out)
    assert [row["concurrency"] for row in found] == [1, 2]
    for row in found:
        assert (row["kind"], row["model"], row["method"]) == ("serve-load", "target", "peagle")
        assert (row["num_speculative_tokens"], row["max_num_seqs"]) == (3, 2)
        assert (row["codes"], row["tokens"]) == ({"OK": 40}, 40 * 16)
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
        assert row["goodput"] == pytest.approx(row["requests_per_second"])
        assert row["acceptance_length"] >= 1
    assert "40 OK" in capsys.readouterr().out


MISTAKES = {
    "drop --address": ["--address", "localhost:1", "--", "--max-num-seqs", "4"],
    "no answer from peagle.v1.Generation": ["--address", "127.0.0.1:1"],
    "http is for a server": ["--address", "127.0.0.1:1", "--protocols", "http"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line(tmp_path, capsys, message):
    out = ["--out", str(tmp_path / "rows.jsonl"), "--sha", "abc", "--no-cache"]
    assert main(["serve-load", *out, *MISTAKES[message]]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    out = ["--out", str(tmp_path / "rows.jsonl"), "--sha", "abc", "--no-cache"]
    assert main(["serve-load", *out, "--", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
