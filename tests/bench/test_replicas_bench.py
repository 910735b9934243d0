"""`peagle-bench replicas`: measured rows stay as they are, the rest follows from them by the stated formulas."""

import json
from collections import Counter

import pytest

from bench import replicas, rows
from bench.__main__ import main
from bench.command import RESULTS
from bench.commands.decode_step import Options
from bench.decode_step import kind
from peagle_jax.errors import ConfigError

MOE = "qwen3-coder-30b-a3b-fp8"
DENSE = "llama-3.1-8b"
ONE = {1: 6.0, 8: 11.0, 32: 15.0}
TWO = {1: 7.0, 8: 9.0, 32: 12.0}


def row(gpus: int, concurrency: int, ms: float, **changes) -> dict:
    return {
        "kind": "parallel-step", "model": MOE, "dtype": "bfloat16", "weights": "fp8",
        "kv_cache_dtype": "auto", "activations": "bf16", "temperature": 0.0, "max_tokens": 128,
        "method": "peagle", "num_speculative_tokens": 7, "device": "NVIDIA H200", "jax": "0", "sha": "abc",
        "date": "2026-01-01", "tensor_parallel": gpus, "concurrency": concurrency, "ms_per_round": ms,
        "kernels_per_round": 600,
    } | changes  # fmt: skip


def made(**changes) -> list[dict]:
    measured = {1: ONE, 2: TWO}
    return [row(n, c, ms, **changes) for n, of in measured.items() for c, ms in of.items()]


def rounds(**changes) -> replicas.Rounds:
    (one,) = replicas.groups(made(**changes))
    return one


@pytest.mark.parametrize("model", [MOE, DENSE])
def test_measured_times_are_the_rows(model):
    one = rounds(model=model)
    for gpus, of in ((1, ONE), (2, TWO)):
        for sequences, ms in of.items():
            assert one.time(gpus, sequences) == replicas.Time(ms, "measured")
    assert one.loads == [1, 8, 32]


def test_layouts_that_cannot_be_projected_are_left_out():
    (one,) = replicas.groups(made(kernels_per_round=None))
    table = replicas.table(one, [2, 4])
    assert list(table.left_out) == ["one engine over 4"]
    assert [line[:2] for line in table.lines] == [
        ["2", "2 replicas"], ["2", "one engine over 2"], ["4", "4 replicas"], ["4", "2 replicas of 2 GPUs"],
    ]  # fmt: skip


def test_replicas_that_ran_at_the_same_time_stand_in_their_layout():
    (one,) = replicas.groups([*made(replicas=1), row(1, 8, 9.9, replicas=2)])
    assert one.layout(2, 1, 8) == replicas.Time(9.9, "measured")
    assert one.layout(2, 1, 32).source == "computed"
    assert one.layout(1, 1, 8) == replicas.Time(ONE[8], "measured")
    assert one.layout(2, 2, 16) == replicas.Time(TWO[8], "measured")
    line = replicas.table(one, [2]).lines[0]
    assert line[1:4] == ["2 replicas", "6.00", "9.90"]


@pytest.mark.parametrize("model", [MOE, DENSE])
@pytest.mark.parametrize("gpus", [1, 2])
def test_computed_times_lie_between_the_measured_ones(model, gpus):
    times = [rounds(model=model).time(gpus, sequences) for sequences in range(1, 33)]
    assert {one.source for one in times} == {"measured", "computed"}
    computed = [one.ms for one in times if one.source == "computed"]
    assert computed == sorted(computed)
    assert min(ONE[1], TWO[1]) < computed[0] < computed[-1] < max(ONE[32], TWO[32])


def test_a_mixture_of_experts_repeats_its_reads_in_each_replica():
    """Experts are read by few sequences already: half of 8 sequences take more than half of the step from 1 to 8."""
    assert rounds().time(1, 4).ms > (ONE[1] + ONE[8]) / 2


def test_a_projection_continues_the_largest_measured_number_of_gpus():
    """By the formulas: launches stay, the rest divides, messages take longer; what 2 GPUs lose is kept."""
    one = rounds(model=DENSE)
    launches = 600 * 2.6e-3
    lost = TWO[8] - (launches + (ONE[8] - launches) / 2)
    part = 64 * 4096 * 2 / 330e6
    collectives = 2 * 32 + 2 + 2 * one.head_layers + 2
    wanted = launches + (ONE[8] - launches) / 4 + lost + collectives * 2 * part
    projected = one.time(4, 8)
    assert projected.source == "projected"
    assert projected.ms == pytest.approx(wanted)


def test_few_rows_choose_experts_unevenly():
    """Of 8 rows with 8 of 128 experts each, the fullest of 8 devices reads 1.43 times the mean; of 256 rows all."""
    assert replicas.imbalance(128, 8, 8, 1) == 1
    assert replicas.imbalance(128, 8, 8, 2) == pytest.approx(1.08, abs=0.01)
    assert replicas.imbalance(128, 8, 8, 8) == pytest.approx(1.43, abs=0.02)
    assert replicas.imbalance(128, 8, 256, 8) == pytest.approx(1, abs=0.001)


def test_layouts_share_the_sequences():
    assert replicas.layouts(4) == [(4, 1), (2, 2), (1, 4)]
    header, lines, left_out = replicas.table(rounds(), [2])
    assert not left_out
    assert header == ["GPUs", "layout", "1 sequence", "8 sequences", "32 sequences"]
    first, second = lines
    half = rounds().time(1, 16).ms
    assert first[:3] == ["2", "2 replicas", "6.00"]  # the other one has no work
    assert first[4] == f"{half:.2f} (computed)"
    assert second == ["2", "one engine over 2", "7.00", "9.00", "12.00"]


def test_rows_of_one_gpu_may_be_those_of_decode_step():
    some = made()
    for one in some:
        if one["tensor_parallel"] == 1:
            one["kind"] = "decode-step"
            del one["tensor_parallel"]
    (found,) = replicas.groups([*some, row(1, 1, 99.0, date="2025-01-01")])
    assert found.measured == rounds().measured


@pytest.mark.parametrize(
    ("some", "message"),
    [
        (made()[:3], "several GPUs"),
        (made()[2:], "three loads on one GPU"),
        ([{"kind": "acceptance"}], "three loads on one GPU"),
    ],
)
def test_rows_that_do_not_suffice_are_one_line(some, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in some))
    assert main(["replicas", "--rows", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_says_which_layouts_are_left_out_and_why(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in made(kernels_per_round=None)))
    assert main(["replicas", "--rows", str(path)]) == 0
    left_out = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(left_out) == 1
    assert "one engine over 8" in left_out[0]
    assert "--profile" in left_out[0]


def test_loads_that_were_not_measured_are_refused():
    with pytest.raises(ConfigError, match="1 to 32"):
        rounds().time(1, 64)
    with pytest.raises(ConfigError, match="16 GPUs"):
        rounds().time(16, 8)


def test_the_command_prints_the_measured_rows_of_the_repository(capsys):
    assert main(["replicas"]) == 0
    out = capsys.readouterr().out
    all_rows = rows.read([RESULTS / "parallel.jsonl"])
    steps = [one for one in all_rows if one["kind"] == "parallel-step"]
    kind = lambda row: (row["model"], row["device"])
    alone = Counter(kind(one) for one in steps if one.get("replicas") == 1)
    compared = {one for one, loads in alone.items() if loads > 2}
    newest = {
        (kind(one), one["concurrency"]): one
        for one in sorted(steps, key=lambda one: one["date"])
        if one.get("tensor_parallel") == 2 and one["activations"] == "bf16"
        if one.get("variant") in (None, "peers") and kind(one) in compared
        if one["temperature"] == 0
    }
    assert len(newest) > 8
    for one in newest.values():
        assert f"{one['ms_per_round']:.2f}" in out
    assert "projected" in out
    assert main(["replicas", "--gpus", "3"]) == 2


def test_rows_of_several_devices_are_a_kind_of_their_own():
    """Otherwise the newest of them would take the place of the row of one device in the tables."""
    options = Options(preset=MOE)
    assert kind(options) == "decode-step"
    assert kind(Options(preset=MOE, tensor_parallel=2)) == "parallel-step"
