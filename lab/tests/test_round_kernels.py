"""The table of kernels from a small trace made by hand, and from a machine without a GPU."""

import gzip
import json

import pytest

from lab.kernel_timing import latest_trace
from lab.round_kernels import profile_rounds, read_trace
from peagle_jax import Engine, EngineConfig, SamplingParams
from tests import tiny

GPU, HOST = 1, 7


def name_of(pid: int, name: str, tid: int | None = None) -> dict:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def launch(name: str, ts: float, dur: float, tid: int = 13, pid: int = GPU, **args) -> dict:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": args}


TWO_ROUNDS = [
    name_of(GPU, "/device:GPU:0"),
    name_of(GPU, "Stream #13(Compute,MemcpyD2H)", 13),
    name_of(GPU, "Stream #14(Compute)", 14),
    name_of(GPU, "XLA Ops", 99),
    name_of(HOST, "/host:CPU"),
    launch("moe_kernel", 100, 40, tf_op="jit(step)/moe"),
    launch("loop_add_fusion_3", 140, 10, hlo_op="loop_add_fusion.3"),
    launch("loop_add_fusion_12", 145, 10, tid=14),
    launch("moe_kernel", 200, 60, tf_op="jit(step)/moe"),
    launch("MemcpyD2H", 265, 5),
    launch("everything", 100, 160, tid=99),  # a track that repeats the streams
    launch("python", 0, 1000, pid=HOST, tid=1),
    {},
]


def written(folder, events, run="2026_01_01") -> None:
    place = folder / "plugins" / "profile" / run
    place.mkdir(parents=True)
    with gzip.open(place / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events, "metadata": {}}, file)


def test_kernels_are_counted_by_round_and_streams_only(tmp_path):
    written(tmp_path, TWO_ROUNDS)
    table = read_trace(latest_trace(tmp_path), rounds=2)
    assert [(k.name, k.count, k.us) for k in table.kernels] == [
        ("moe_kernel", 1.0, 50.0),
        ("loop_add_fusion", 1.0, 10.0),
    ]
    assert table.kernels[0].op == "jit(step)/moe"
    assert table.kernels[0].share == pytest.approx(100 / 120)
    assert (table.count, table.us, table.copies, table.span_us) == (2.0, 60.0, 0.5, 80.0)
    assert table.busy == pytest.approx((55 + 60) / 160)
    assert table.lines()[1] == ["loop_add_fusion", "1", "10.0", "16.7 %"]


def test_a_trace_without_a_gpu_has_no_table(tmp_path):
    written(tmp_path, [event for event in TWO_ROUNDS if event.get("pid") != GPU])
    assert read_trace(latest_trace(tmp_path), rounds=2) is None


def test_a_folder_without_a_trace_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no trace\.json\.gz"):
        latest_trace(tmp_path)


@pytest.mark.slow
def test_rounds_are_traced_on_any_machine(tmp_path):
    engine = Engine(tiny.target(), None, EngineConfig(max_num_seqs=2, max_model_len=64))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    traced = profile_rounds(engine, [[1, 2], [3, 4]], params, rounds=3, folder=tmp_path)
    assert traced is None  # a CPU has no kernels
    assert latest_trace(tmp_path).is_file()
    assert not engine.has_work
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    assert profile_rounds(engine, [[1, 2], [3, 4]], short, rounds=3) is None
