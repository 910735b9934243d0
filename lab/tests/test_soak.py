"""The soak: what a row says of growth, and a short one against a server."""

import os
from pathlib import Path

import pytest

from lab import soak

ROOT = Path(__file__).parents[2]
SMALL_PRESETS = ROOT / "tests" / "bench" / "small_presets"

FINE = {
    "unanswered": 0,
    "left": {"running": 0, "waiting": 0, "pages": 0},
    "processes": [
        {
            "growth_mb": 3.0,
            "start": {"descriptors": 20, "threads": 10},
            "warm": {"descriptors": 40, "threads": 18},
            "end": {"descriptors": 22, "threads": 18},
        }
    ],
}
OF_PROCESS = FINE["processes"][0]
BROKEN = {
    "status": {"unanswered": 1},
    "memory": {"processes": [OF_PROCESS | {"growth_mb": 51.0}]},
    "descriptors": {"processes": [OF_PROCESS | {"end": {"descriptors": 40, "threads": 18}}]},
    "threads": {"processes": [OF_PROCESS | {"end": {"descriptors": 22, "threads": 40}}]},
    "left": {"left": {"running": 0, "waiting": 0, "pages": 1}},
}


@pytest.mark.parametrize("target", BROKEN)
def test_a_row_names_the_targets_that_it_misses(target):
    assert soak.missed(FINE, {}) == []
    assert soak.missed(FINE | BROKEN[target], {}) == [target]
    assert soak.missed(FINE, {"HTTP chat": {"500": 1}}) == ["status"]


def test_growth_is_that_after_the_warm_up():
    """100 MB in the first tenth of an hour, then 10 MB an hour."""
    moments = [0, 180, 360, 600, 1800, 3600]
    sizes = [100, 150, 200, 200 + 240 / 360, 204, 209]
    of = lambda mb: {"role": "engine", "resident_mb": mb, "cpu_seconds": 1.0}
    samples = [
        {"seconds": moment, "processes": {7: of(mb)}}
        for moment, mb in zip(moments, sizes, strict=True)
    ]
    samples[2]["processes"][8] = of(1.0)  # a process that ended meanwhile
    (found,) = soak._grown(samples)
    assert (found["start"]["resident_mb"], found["end"]["resident_mb"]) == (100, 209)
    assert found["mb_an_hour"] == pytest.approx(10, rel=0.02)
    assert found["growth_mb"] == pytest.approx(10 * 5 / 6, rel=0.02)


PRESETS = {
    "embedded": {},
    "random": dict(preset="qwen3-0.6b", layers=1, synthetic_acceptance_length=2.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", PRESETS)
def test_every_request_of_a_short_soak_gets_one_right_answer(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{SMALL_PRESETS}{os.pathsep}{ROOT}")
    options = dict(minutes=0.3, rate=6.0, interval=2.0, out=tmp_path / "soak.jsonl")
    row = soak.soak(soak.Options(**options, **PRESETS[model]))
    assert not {"status", "left"} & set(row["missed"]), row["answers"]
    assert row["requests"] > 50
    assert all(row["answers"].values())
    assert {one["role"] for one in row["processes"]} >= {"api", "engine"}
