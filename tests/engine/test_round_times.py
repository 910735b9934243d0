"""Times of rounds: over idle slots, of real rounds, and in files."""

import json
import logging
import operator

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax import EngineConfig
from peagle_jax.engine.device.stored_times import FOLDER, StoredTimes, read_times
from peagle_jax.engine.host import round_times
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.round_times import IDLE_RUNS, RoundTimes, monotone

SHAPES = st.builds(RoundShape, st.integers(1, 64), st.integers(0, 8))
SECONDS = st.floats(1e-6, 10)
IDLE = {
    RoundShape(*shape): seconds
    for shape, seconds in [
        ((1, 0), 1.0),
        ((1, 3), 2.0),
        ((1, 7), 4.0),
        ((8, 0), 3.0),
        ((8, 7), 6.0),
    ]
}


def test_times_are_monotone_and_none_falls(num_cases):
    @settings(max_examples=num_cases("tables of round times", 200), deadline=None)
    @given(st.dictionaries(SHAPES, SECONDS, max_size=12))
    def check(seconds):
        table = monotone(seconds)
        assert table.keys() == seconds.keys()
        for shape, value in table.items():
            assert value >= seconds[shape]
            assert value in seconds.values()
            lighter = [s for s in table if all(map(operator.le, s, shape))]
            assert all(value >= table[s] for s in lighter)

    check()


def test_an_idle_time_is_the_median_of_runs_after_the_first():
    times, shape = RoundTimes(), RoundShape(4, 3)
    for number, seconds in enumerate([9.0e-3, 5.0e-3, 1.0e-3, 2.0e-3, 4.0e-3, 3.0e-3]):
        assert times.untimed([shape]) == [shape], number
        times.add_idle_run(shape, seconds)
    assert times.untimed([shape]) == []
    assert times.idle == {shape: 3.0e-3}


def test_runs_over_idle_slots_alternate_between_the_rounds_of_a_bucket():
    """A slow moment falls on all of them, so that it changes no ratio."""
    times, order = RoundTimes(), []
    shapes = [RoundShape(size, k) for size in (4, 8) for k in (0, 3, 7)]
    while missing := times.untimed(shapes):
        order.append(missing[0])
        slow = 5 if 6 < len(order) <= 15 else 1  # three turns of the first bucket
        times.add_idle_run(missing[0], slow * 1e-3 * (1 + missing[0].num_draft))
    assert order[:6] == 2 * shapes[:3]
    assert {shape.size for shape in order[:18]} == {4}
    idle = times.idle
    for size in (4, 8):
        assert idle[RoundShape(size, 7)] / idle[RoundShape(size, 0)] == pytest.approx(8)


def test_slow_rounds_are_run_less_often():
    times, shape = RoundTimes(), RoundShape(4, 3)
    for seconds in (2.0, 1.0):
        times.add_idle_run(shape, seconds)
    assert times.idle == {shape: 1.0}
    assert IDLE_RUNS > 1


def rounds(times: RoundTimes, shape: tuple[int, int], seconds: float, count: int = 15) -> None:
    for _ in range(count):
        times.add_round(RoundShape(*shape), seconds)


def test_real_rounds_scale_all_times_of_their_batch_bucket():
    times = RoundTimes(IDLE)
    assert times.seconds(1, (0, 3, 7)) == {0: 1.0, 3: 2.0, 7: 4.0}
    rounds(times, (1, 7), 6.0, 7)
    assert times.seconds(1, (0, 3, 7)) == {0: 1.0, 3: 2.0, 7: 4.0}  # too few of them
    rounds(times, (1, 7), 6.0, 1)
    assert times.seconds(1, (0, 3, 7)) == {0: 1.5, 3: 3.0, 7: 6.0}
    assert times.seconds(8, (0, 3, 7)) == {0: 3.0, 7: 6.0}  # K = 3 has no time there
    rounds(times, (1, 7), 600.0, 1)  # one slow round
    assert times.seconds(1, (0, 3, 7)) == {0: 1.5, 3: 3.0, 7: 6.0}


def test_the_ratio_of_two_k_is_learned_where_one_follows_the_other():
    """Over idle slots K = 7 takes twice as long as K = 3; in real rounds it takes as long."""
    times = RoundTimes(IDLE)
    for _ in range(6):
        rounds(times, (1, 7), 10.0)
        rounds(times, (1, 3), 10.0)
    found = times.seconds(1, (3, 7))
    assert found[3] == pytest.approx(10.0)
    assert found[7] == pytest.approx(10.0, rel=0.1)


def test_what_real_rounds_show_holds_at_once_and_for_the_k_in_between():
    """Over idle slots a round takes 1, 4 and 16; in real rounds that of K = 7 takes a quarter longer than that of 3."""
    times = RoundTimes({(1, 3): 1.0, (1, 5): 4.0, (1, 7): 16.0, (1, 0): 0.5})
    rounds(times, (1, 7), 10.0)
    rounds(times, (1, 3), 8.0)
    assert times.seconds(1, (0, 3, 5, 7)) == pytest.approx(
        {0: 4.0, 3: 8.0, 5: 80**0.5, 7: 10.0}  # K = 0: as K = 3 beside it
    )
    rounds(times, (1, 5), 9.0)
    assert times.seconds(1, (3, 5)) == pytest.approx({3: 8.0, 5: 9.0})


def test_a_device_that_slows_down_changes_no_ratio():
    times, before = RoundTimes(IDLE), 1.0
    for seconds in (1.0, 30.0, 2.0, 0.1):
        rounds(times, (1, 7), 4 * before)
        rounds(times, (1, 7), 4 * seconds)
        rounds(times, (1, 3), 2 * seconds)
        found = times.seconds(1, (0, 3, 7))
        assert found == pytest.approx({0: seconds, 3: 2 * seconds, 7: 4 * seconds})
        before = seconds


def test_a_ratio_of_a_bad_moment_is_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr(round_times, "_VALID_ROUNDS", 100)
    times = RoundTimes(IDLE)
    rounds(times, (1, 7), 4.0)
    rounds(times, (1, 3), 2000.0)
    rounds(times, (1, 7), 4.0, 100)
    assert times.seconds(1, (3, 7))[3] > 4.0 - 1e-6
    rounds(times, (1, 7), 4.0, 1)
    assert times.seconds(1, (3, 7))[3] < times.seconds(1, (3, 7))[7]


def test_two_rounds_of_an_exploration_teach_nothing():
    times = RoundTimes(IDLE)
    rounds(times, (1, 3), 2.0)
    for _ in range(20):
        rounds(times, (1, 7), 1000.0, 2)
        rounds(times, (1, 3), 2.0)
    assert times.seconds(1, (0, 3, 7)) == {0: 1.0, 3: 2.0, 7: 4.0}


def test_times_that_are_measured_later_leave_what_was_learned():
    times = RoundTimes({(1, 0): 1.0, (1, 7): 4.0})
    for _ in range(9):
        rounds(times, (1, 7), 3.0)
        rounds(times, (1, 0), 3.0)
    learned = times.seconds(1, (0, 7))
    assert learned == pytest.approx({0: 3.0, 7: 3.0}, rel=0.05)
    for _ in range(6):
        times.add_idle_run(RoundShape(1, 3), 2.0)
    assert times.seconds(1, (0, 7)) == learned
    assert 3 in times.seconds(1, (0, 3, 7))


@pytest.fixture
def stored(tmp_path, monkeypatch) -> StoredTimes:
    monkeypatch.setattr(
        type(jax.config), "jax_compilation_cache_dir", property(lambda self: str(tmp_path))
    )
    made = StoredTimes([], None, EngineConfig())
    assert made.path.parent == tmp_path / FOLDER
    return made


def test_a_file_gives_back_what_was_stored(stored):
    assert stored.load() == {}
    stored.save(RoundTimes(IDLE).idle)
    assert stored.load() == IDLE
    assert read_times(stored.path.read_text()) == IDLE
    assert [path.name for path in stored.path.parent.iterdir()] == [stored.path.name]
    assert StoredTimes([], None, EngineConfig(max_num_seqs=9)).load() == {}
    assert StoredTimes([], None, EngineConfig(num_pages=5000)).load() == IDLE  # as memory allows


def test_a_file_is_found_again_by_another_process(stored):
    """Trees of modules are shown with addresses of objects, which differ from process to process."""
    things = [object() for _ in range(3)]  # alive together, at different addresses
    paths = {StoredTimes([], thing, EngineConfig()).path for thing in things}
    assert len(paths) == 1
    assert paths != {stored.path}
    assert StoredTimes([], "another tree", EngineConfig()).path not in paths


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ignored"),
        (b"\xff\x00", "ignored"),
        ("[" * 10**5, "no file of round times"),
        ("[]", "no file of round times"),
        ('{"seconds": []}', "no file of round times"),
        ('{"key": {}, "seconds": [[1, 0, 1.0]]}', "another device, version or model"),
        ([[1, 0]], "ignored"),
        ([[1, 0, "x"]], "no time of a round"),
        ([[1, 0, -1.0]], "no time of a round"),
        ([[1, 0, float("inf")]], "no time of a round"),
        ([[0, 0, 1.0]], "no time of a round"),
        ([[1, -1, 1.0]], "no time of a round"),
        ([[1, 7, 0, 1.0]], "no file of round times"),
        ([[[1], 0, 1.0]], "ignored"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_log_line(stored, text, reason, caplog):
    if isinstance(text, list):
        text = json.dumps({"key": stored._key, "seconds": text})
    stored.path.parent.mkdir()
    stored.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        assert stored.load() == {}
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_folder_that_cannot_be_written_costs_a_log_line(stored, caplog):
    stored.path.parent.write_text("a file where the folder should be")
    stored.save({RoundShape(1, 0): 1.0})
    assert "cannot be kept" in caplog.text
    assert stored.load() == {}


def test_without_a_cache_nothing_is_stored(monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", property(lambda self: None))
    stored = StoredTimes([], None, EngineConfig())
    stored.save({RoundShape(1, 0): 1.0})
    assert stored.path is None
    assert stored.load() == {}
