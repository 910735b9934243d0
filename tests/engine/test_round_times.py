"""Times of rounds: over idle slots, of real rounds, and in files."""

import json
import logging

import jax
import pytest

from peagle_jax import EngineConfig
from peagle_jax.engine.device.stored_times import FOLDER, StoredTimes, read_times
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.round_times import RoundTimes

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
    """Trees of modules are shown with addresses, which differ from process to process."""
    things = [object() for _ in range(3)]  # alive together, at different addresses
    paths = {StoredTimes([], thing, EngineConfig()).path for thing in things}
    assert len(paths) == 1
    assert paths != {stored.path}
    assert StoredTimes([], "another tree", EngineConfig()).path not in paths


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ignored"),
        ("[" * 10**5, "no file of round times"),
        ('{"seconds": []}', "no file of round times"),
        ('{"key": {}, "seconds": [[1, 0, 1.0]]}', "another device, version or model"),
        ([[1, 0]], "ignored"),
        ([[1, 0, "x"]], "no time of a round"),
        ([[1, 0, -1.0]], "no time of a round"),
        ([[1, -1, 1.0]], "no time of a round"),
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
