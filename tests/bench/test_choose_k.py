"""K by batch size from measured rows."""

import json

import pytest

from bench.__main__ import main
from bench.choose_k import acceptance_of, choose, times_of
from peagle_jax.draft_schedule import parse
from peagle_jax.errors import ConfigError

ACCEPTANCE = [0.8, 0.6, 0.4]
TIMES = {
    (1, 0): 4.0,
    (1, 1): 4.0,
    (1, 3): 4.4,
    (8, 0): 5.0,
    (8, 1): 6.0,
    (8, 3): 12.0,
    (32, 0): 6.0,
    (32, 3): 40.0,
}


def row(
    kind: str, method: str, k: int, concurrency: int, ms: float, date: str = "1", **fields
) -> dict:
    return dict(
        kind=kind, model="m", method=method, num_speculative_tokens=k, concurrency=concurrency,
        ms_per_round=ms, date=date, rounds=10, **fields,
    )  # fmt: skip


def test_the_best_k_has_the_most_tokens_per_second():
    choice = choose(TIMES, ACCEPTANCE, least_gain=0.0)
    assert choice.rates[1, 0] == pytest.approx(1e3 / 4.0)
    assert choice.rates[8, 1] == pytest.approx(8e3 * 1.8 / 6.0)
    assert choice.rates[8, 3] == pytest.approx(8e3 * 2.8 / 12.0)
    assert choice.schedule == [(1, 1, 3), (2, 8, 1), (9, 32, 0)]


def test_a_larger_k_must_gain_enough_and_equal_neighbours_are_one_range():
    choice = choose({(1, 0): 4.0, (1, 1): 7.0, (4, 0): 4.0, (4, 1): 7.1}, [0.8], least_gain=0.0)
    assert choice.schedule == [(1, 4, 1)]
    choice = choose({(1, 0): 4.0, (1, 1): 7.0, (4, 0): 4.0, (4, 1): 7.1}, [0.8], least_gain=0.05)
    assert choice.schedule == [(1, 4, 0)]


def test_times_never_fall_with_more_rows():
    """A time that was measured too short does not decide."""
    choice = choose({(1, 0): 4.0, (1, 1): 3.0, (8, 0): 2.0}, [0.1], least_gain=0.0)
    assert choice.rates == {(1, 0): 250.0, (1, 1): pytest.approx(275.0), (8, 0): 2000.0}


def test_times_and_acceptance_come_from_the_rows_that_measured_them():
    measured = [
        row("throughput", "none", 0, 1, 4.0),
        row("decode-step", "peagle", 3, 1, 9.0, date="1", acceptance_per_position=[1.0, 0.0, 0.0]),
        row("decode-step", "peagle", 3, 1, 5.0, date="2", acceptance_per_position=[1.0, 0.0, 0.0]),
        row("acceptance", "peagle", 1, 1, 7.0, acceptance_per_position=[0.9]),
        row("throughput", "peagle", 3, 8, 6.0, acceptance_per_position=ACCEPTANCE),
        row("throughput", "eagle3", 3, 1, 1.0, acceptance_per_position=[0.1] * 3),
    ]
    assert times_of(measured, "m", "peagle") == {(1, 0): 4.0, (1, 3): 5.0, (8, 3): 6.0}
    assert acceptance_of(measured, "m", "peagle") == ACCEPTANCE
    with pytest.raises(ConfigError, match="there are rows of m"):
        times_of(measured, "other", "peagle")
    with pytest.raises(ConfigError, match="give --acceptance"):
        acceptance_of(measured[:3], "m", "peagle")


def test_the_command_prints_a_table_and_an_option_that_the_server_takes(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    measured = [
        row("decode-step", "peagle" if k else "none", k, b, ms) for (b, k), ms in TIMES.items()
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in measured))
    argv = ["choose-k", "--rows", str(path), "--model", "m", "--acceptance", "0.8,0.6,0.4"]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["concurrency", "K=0", "K=1", "K=3"]
    assert out[2].split() == ["1", "250", "450", "636*"]
    assert out[4].split() == ["32", "5,333*", "-", "2,240"]
    ranges = out[-1].split("'")[1]
    assert parse(ranges) == ((1, 1, 3), (2, 8, 1), (9, 32, 0))
    with pytest.raises(SystemExit):
        main([*argv[:-1], "0.4,0.6"])


def test_the_table_of_an_engine_is_that_of_its_stored_times(tmp_path, capsys):
    path = tmp_path / "times.json"
    stored = [[b, k, ms / 1e3] for (b, k), ms in TIMES.items()]
    path.write_text(json.dumps({"key": {}, "seconds": stored}))
    argv = ["choose-k", "--times", str(path), "--acceptance", "0.8,0.6,0.4"]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["1", "250", "450", "636*"]
    assert parse(out[-1].split("'")[1]) == ((1, 1, 3), (2, 8, 1), (9, 32, 0))
    for text, message in (
        ("[]", "no file of round times"),
        ('{"seconds": [[1, 0, 1.0]]}', "no time of a round with drafts"),
    ):
        path.write_text(text)
        assert main(argv) == 2
        assert message in capsys.readouterr().err
    assert main(["choose-k", "--times", str(tmp_path / "none.json"), *argv[3:]]) == 2
    assert "cannot be read" in capsys.readouterr().err
