"""`python -m lab ladder`: predictions, and rows of steps that fail."""

import json
import os
import threading

import pytest

from lab import kernel_timing, kernels, ladder
from lab.__main__ import main
from lab.ladder_model import predict
from lab.lesson import specs
from pallas_kernels.device import H200


def measured(name: str, **changes) -> dict:
    """A row as `python -m lab ladder` writes it."""
    base = dict(us=60.0, bytes_per_second=4e12, fraction_of_bandwidth=0.93, timed_by="trace")
    row = ladder.measured(name, base | dict(max_relative_error=0.004) | changes)
    return dict(kind="ladder", device="Chip", date="2026-01-01", jax="1", sha="abc") | row


LARGE = "llama-8b-gate-up"


def test_no_prediction_is_below_the_floor():
    for spec in specs.SPECS.values():
        prediction = predict(spec)
        assert prediction.seconds > prediction.floor == spec.bytes / 4.3e12


def dies(names, sender):
    sender.send(ladder.failed(names[0], "first"))
    os._exit(7)


def hangs(names, sender):
    threading.Event().wait()


def test_a_step_whose_process_ends_is_a_row_for_each_of_its_specs():
    found = list(ladder.run_step("2_ring", dies))
    assert [row["spec"] for row in found] == [name for name in specs.SPECS if name[0] == "2"]
    assert [row["error"] for row in found] == ["first"] + ["its process ended with exit code 7"] * 3
    assert {row["us"] for row in found} == {None}


def test_a_step_that_hangs_ends_at_the_limit():
    found = list(ladder.run_step("6_grouped", hangs, seconds=0.01))
    assert [row["error"] for row in found] == ["no result in 0.01 s"] * 4


class Rows(list):
    send = list.append


@pytest.mark.usefixtures("quick")
def test_a_spec_that_fails_does_not_end_the_others(monkeypatch):
    shape = dict(weight="w", rows=8, inputs=128)
    some = {
        "bad": specs.Spec(step="1_wgmma", outputs=100, **shape),
        "good": specs.Spec(step="5_fp8", outputs=256, **shape),
    }
    monkeypatch.setattr(specs, "SPECS", some)
    found = Rows()
    ladder.measure_specs(list(some), found)
    bad, good = found
    assert bad["error"].startswith("ValueError: the weight is a multiple of")
    assert good["error"] is None
    assert good["us"] > 0


@pytest.fixture
def quick(monkeypatch):
    """One call a program, once."""
    monkeypatch.setattr(kernels, "_CALLS", (2, 2))
    monkeypatch.setattr(kernel_timing, "_SECONDS", 0)
    monkeypatch.setattr(kernel_timing, "_REPEATS", 1)


@pytest.mark.parametrize(
    ("difference", "error"),
    [
        (0.01, None),
        (0.02, "wrong: differs from the reference by 2.0e-02"),
        (float("nan"), "wrong: differs from the reference by nan"),
        (None, "not compared: the reference did not run"),
    ],
)
def test_a_wrong_result_is_an_error(difference, error):
    row = measured(f"2_ring-{LARGE}-8", max_relative_error=difference)
    assert (row["error"], row["us"]) == (error, 60.0)


def test_without_a_gpu_it_says_so(capsys, tmp_path):
    assert main(["ladder", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "the ladder is for Hopper GPUs" in capsys.readouterr().err


def test_rows_are_printed_and_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "describe", lambda device: H200)
    one = lambda step: [ladder.failed(next(n for n in specs.SPECS if n.startswith(step)), "broke")]
    monkeypatch.setattr(ladder, "run_step", one)
    out = tmp_path / "rows.jsonl"
    assert main(["ladder", "--out", str(out), "--sha", "abc", "--no-cache"]) == 1
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in kept] == list(specs.STEPS)
    assert {(row["kind"], row["sha"], row["error"]) for row in kept} == {("ladder", "abc", "broke")}
    assert capsys.readouterr().out.count("broke") == len(specs.STEPS)
