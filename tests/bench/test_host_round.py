"""The host's parts of a round: counted while the clock is on, and shown without overlaps."""

from types import SimpleNamespace

from bench import host_page
from bench.host_round import Clock, measure
from peagle_jax import Engine, EngineConfig
from tests import tiny

ROW = {
    "kind": "host-round", "device": "Chip", "model": "m", "dtype": "float32", "method": "peagle",
    "num_speculative_tokens": 7, "concurrency": 32, "rounds_per_call": 1, "program": "greedy", "jax": "1",
    "sha": "abc", "date": "2026-01-01", "us_per_round": 1234.4, "us_fastest": 1000.0, "us_slowest": 2000.0,
    "us_parts": dict(schedule=10.0, dispatch=500.0, plan=20.0, output=30.0, fetch=60.0, commit=100.0),
}  # fmt: skip


def test_a_clock_counts_only_while_it_is_on():
    clock, owner = Clock(), SimpleNamespace(work=lambda x: x + 1)
    clock.watch(owner, "work", "part")
    assert owner.work(1) == 2
    assert clock.seconds == {}
    clock.is_on = True
    assert owner.work(2) == 3
    found = clock.seconds["part"]
    assert found > 0
    clock.restore()
    assert owner.work(3) == 4
    assert clock.seconds["part"] == found


def test_the_parts_of_a_round_are_within_its_time():
    config = EngineConfig(num_draft=2, max_num_seqs=1, max_model_len=48, greedy_rounds=True)
    engine = Engine(tiny.target(**tiny.ONE_LAYER), tiny.head(**tiny.HEAD_OF_ONE_LAYER), config)
    engine.warm_up()
    clock = Clock()
    clock.watch_engine(engine)
    try:
        row = measure(engine, [[3, 4, 5]], 24, 1, clock)
    finally:
        clock.restore()
    parts = row["us_parts"]
    assert set(parts) == {"schedule", "dispatch", "plan", "output", "fetch", "commit"}
    assert parts["plan"] + parts["output"] < parts["dispatch"]
    assert parts["fetch"] < parts["commit"]
    assert row["rounds"] > 10
    assert 1 <= row["tokens_per_round"] <= 3


def test_the_table_shows_disjoint_parts():
    line = host_page.host_table([ROW]).splitlines()[-1]
    assert (
        line
        == "| P-EAGLE K=7, greedy | 32 | 1,234 | 1,000 | 2,000 | 10 | 20 | 450 | 30 | 60 | 40 |"
    )


def test_the_table_has_a_part_for_each_commit_and_says_how_many_rounds_a_call_runs():
    later = ROW | {"sha": "def", "rounds_per_call": 4, "kernel_us_per_round": 617.2}
    first, second = host_page.host_table([ROW, later]).split("**Chip**")[1:]
    assert "commit abc" in first
    assert first.splitlines()[-2].endswith("| 60 | 40 |")
    assert "commit def" in second
    line = second.splitlines()[-1]
    assert line.startswith("| P-EAGLE K=7, greedy, 4 rounds a call | 32 |")
    assert line.endswith("| 617 (50 %) |")


def test_methods_are_compared_by_the_medians_of_their_runs():
    both = [
        {
            "device": "Chip", "jax": "1", "sha": "abc", "date": "2026-01-01", "method": method,
            "concurrency": 8, "tokens_per_second_of_repeats": speeds, "ms_per_round_of_repeats": rounds,
        }
        for method, speeds, rounds in (
            ("eagle3", [100.0, 90.0, 300.0], [1.0, 2.0, 1.1]),
            ("peagle", [150.0, 100.0, 200.0], [0.5, 0.55, 0.6]),
        )
    ]  # fmt: skip
    line = host_page.methods_table(both).splitlines()[-1]
    assert line == (
        "| 8 |  | 100; 90 to 300 | 150; 100 to 200 | 1.50 | 1,100; 1,000 to 2,000 | 550; 500 to 600 | 0.50 |"
    )
