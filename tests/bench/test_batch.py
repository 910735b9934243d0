"""`peagle-bench batch`: commands of a file within a time; the file for two GPUs; replicas that are timed together."""

import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import batch, decode_step, lossless, random_models, serve_load, side_by_side
from bench.__main__ import main
from bench.batch import Part, parts_of
from bench.commands.batch import BatchOptions
from bench.deviceless import specs_of
from bench.presets import preset
from bench.rows import DATA
from bench.sizes import count
from peagle_jax.config import ConfigError
from peagle_jax.parallel.shares import check_shares
from serving.sources import resolve
from tests.conftest import CHEAP
from tests.waiting import LIMIT

TWO_GPUS = DATA / "two_gpus.txt"
TWO_SMALL_GPUS = DATA / "two_gpus_80gb.txt"
ONE_GPU = DATA / "one_gpu.txt"
SERVED = DATA / "served.txt"
TINY_SIZES = "--method peagle -K 2 --temperature 0 --prompt-tokens 24 --max-tokens 24 --prefills 1"
ROOT = Path(__file__).parents[2]


def test_a_blank_line_begins_a_process():
    text = (
        "# title\n\n# at most 9.5 s\n# while the others compile\nsizes\nreport  # no comment\n\n\n"
        "# environment SHARE=0.9\nmatrix --out 'a b' \\\n  --sha c\n"
    )
    assert parts_of(text) == [
        Part(lines=(("sizes",), ("report", "#", "no", "comment")), seconds=9.5, is_early=True),
        Part(
            lines=(("matrix", "--out", "a b", "--sha", "c"),),
            seconds=None,
            environment=(("SHARE", "0.9"),),
        ),
    ]
    with pytest.raises(ConfigError, match="give a variable"):
        parts_of("# environment SHARE\nsizes")
    with pytest.raises(ConfigError, match="give the seconds"):
        parts_of("# at most some s\nsizes")


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, float]]:
    """Processes that would have run: the first command and the limit of each. Each takes 30 s; the second fails."""
    found, clock = [], [0.0]

    def run(part: Part, seconds: float, environment) -> int:
        found.append((part.lines[0][0], seconds))
        clock[0] += 30
        return int(len(found) == 2)

    monkeypatch.setattr(batch, "_run", run)
    monkeypatch.setattr(batch.time, "monotonic", lambda: clock[0])
    return found


@pytest.mark.parametrize(
    ("seconds", "limits", "code"),
    [
        ([], [7, float("inf"), float("inf")], 1),
        (["--seconds", "100"], [7, 70, 40], 1),
        (["--seconds", "75"], [7, 45], 1),
    ],
)
def test_processes_run_until_the_time_is_over(started, tmp_path, seconds, limits, code, capsys):
    file = tmp_path / "commands"
    file.write_text(
        "# at most 7 s\ndecode-step --preset qwen3-0.6b\n\nlossless\n\ndecode-step --preset qwen3-0.6b\n"
    )
    assert main(["batch", str(file), "--out", str(tmp_path / "rows"), *seconds]) == code
    names = ["decode-step", "lossless", "decode-step"]
    assert started == list(zip(names, limits, strict=False))
    assert ("part 3 of 3 is left out: 15 s are left" in capsys.readouterr().err) == (
        len(limits) == 2
    )


def test_a_wrong_command_is_found_before_any_runs(started, tmp_path, capsys):
    file = tmp_path / "commands"
    file.write_text("decode-step --preset qwen3-0.6b\n\ndecode-step --preset unknown\n")
    assert main(["batch", str(file)]) == 2
    assert not started
    assert "unknown preset" in capsys.readouterr().err
    assert main(["batch", str(tmp_path / "missing")]) == 2


def test_a_process_that_hangs_is_ended_with_its_own_processes(tmp_path, monkeypatch):
    """The file of the sleeping process is open in it alone, so that the end of the pipe is its end."""
    reading, writing = os.pipe()
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ntrap '' INT\nsleep 600 >&{writing} &\nsleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr(batch.sys, "executable", str(script))
    monkeypatch.setattr(batch, "_END_SECONDS", 0.1)
    popen = subprocess.Popen
    monkeypatch.setattr(
        batch.subprocess,
        "Popen",
        lambda *given, **rules: popen(*given, **rules, pass_fds=[writing]),
    )
    assert batch._run(Part(lines=(("sizes",),), seconds=0.1), 0.1, os.environ) == 124
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize("fails", [False, True])
def test_an_early_process_begins_while_others_compile(tmp_path, monkeypatch, fails):
    found, begun = [], threading.Event()

    def compile_all(work, jobs, say, *, seconds, on_ready):
        assert [one.options.concurrency for one in work] == [(1,), (2,)]
        on_ready(0)
        assert begun.wait(LIMIT)  # the first process, while the second program compiles
        found.append("compiled")
        if fails:
            raise OSError("no process can start")
        on_ready(1)

    def run(part: Part, seconds: float, environment) -> int:
        found.append(len(part.lines))
        begun.set()
        return 0

    monkeypatch.setattr(batch, "compile_all", compile_all)
    monkeypatch.setattr(batch, "_run", run)
    file = tmp_path / "commands"
    line = "decode-step --preset qwen3-0.6b --method none --concurrency"
    file.write_text(f"# while the others compile\n{line} 1\n\n{line} 2\nlossless\n")
    assert main(["batch", str(file), "--jobs", "2", "--out", str(out := tmp_path / "rows")]) == 0
    assert not out.exists()
    assert found == [1, "compiled", 2]


@pytest.mark.parametrize(
    ("file", "memory_bytes"),
    [
        (TWO_GPUS, 139 * 2**30),
        (TWO_SMALL_GPUS, 81559 * 2**20),
    ],
)
def test_the_commands_for_two_gpus_fit_and_divide(file, memory_bytes):
    parts = parts_of(file.read_text())
    commands = [(part, *batch._parsed(line)) for part in parts for line in part.lines]
    assert {command.name for _, command, _ in commands} == {"decode-step", "lossless"}
    for part, command, options in commands:
        share = float(dict(part.environment).get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        chosen = preset(options.preset)
        head = chosen.head("peagle")
        size = options.tensor_parallel
        for config in (chosen.target, head):
            check_shares(config, size)
        attention = 4 * head.num_heads * head.head_dim * head.hidden_size
        layers = head.num_layers * (attention + 3 * head.hidden_size * head.intermediate_size)
        of_head = 2 * (layers + (2 * head.vocab_size + 3 * head.hidden_size) * head.hidden_size)
        held = count(chosen.target).num_bytes(chosen.format) + of_head
        assert held / size < 0.9 * share * memory_bytes, options.preset
        make = decode_step.work if command.name == "decode-step" else lossless.work
        assert make(options)
        if command.name == "lossless":
            assert lossless._config(options, [[1]], (8,)).tensor_parallel == size
    assert all(part.seconds for part in parts)  # none can take the time of all
    assert [part.is_early for part in parts].index(False) == 1


def test_the_commands_for_one_gpu_name_what_exists():
    parts = parts_of(ONE_GPU.read_text())
    assert all(part.seconds for part in parts)
    for command, options in [batch._parsed(line) for part in parts for line in part.lines]:
        if command.name == "kernels":
            known = [name for op in options.op for name in specs_of(op).SPECS]
            assert known
            assert set(options.spec or ()) <= set(known)
        else:
            assert {"decode-step": decode_step, "lossless": lossless}[command.name].work(options)


def test_the_commands_for_served_models_end_in_time_and_keep_the_options_of_the_server(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = BatchOptions(file=SERVED, out=file, sha="abc")
    parts = parts_of(SERVED.read_text())
    assert all(part.seconds <= 600 for part in parts)
    for line in [line for part in parts for line in part.lines]:
        _, found = batch._parsed(batch._with_file(line, options))
        serve_load._check(found)
        assert (found.out, found.sha) == (file, "abc")
        settings, _ = resolve(serve_load._options(found))
        assert settings.max_num_seqs >= (128 if found.rate else max(found.concurrency))
        assert found.prompt_tokens + found.max_tokens <= settings.max_model_len


def test_replicas_have_devices_of_their_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [side_by_side._devices_of(i, 2) for i in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    assert [side_by_side._devices_of(i, 1) for i in range(3)] == ["5", "3", "7"]
    with pytest.raises(ConfigError, match="names too few devices"):
        side_by_side._devices_of(1, 2)


def test_the_round_of_replicas_is_that_of_their_common_rate():
    rows = [
        dict(ms_per_round=ms, ms_per_round_mean=2 * ms, concurrency=4, tokens_per_second=100.0)
        for ms in (4.0, 12.0)
    ]
    row = side_by_side._together(rows, "a command")
    assert row["ms_per_round"] == pytest.approx(6.0)
    assert row["ms_per_round_mean"] == pytest.approx(12.0)
    assert (row["concurrency"], row["replicas"], row["tokens_per_second"]) == (8, 2, 200.0)
    assert row["ms_per_round_of_replicas"] == [4.0, 12.0]


def test_cells_of_replicas_are_given_when_the_last_one_has_measured_them():
    """So that a part which is ended, or a replica that fails, costs the cells after it only."""
    ends, others = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    processes = [SimpleNamespace(join=lambda: None, exitcode=code) for code in (0, 9)]
    row = lambda concurrency, replica: dict(concurrency=concurrency, replica=replica)
    found = side_by_side._cells(ends, processes)
    others[0].send(row(1, 0))
    others[0].send(row(8, 0))
    others[1].send(row(1, 1))
    assert next(found) == [row(1, 0), row(1, 1)]
    for other in others:
        other.close()
    with pytest.raises(ConfigError, match="replica 1 ended with exit code 9"):
        next(found)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--replicas", "2", "--concurrency", "3"], "2 replicas cannot share it evenly"),
        (["--selector", "8", "--replicas", "1"], "rounds of one device"),
    ],
)
def test_layouts_that_cannot_be_are_refused(more, message, capsys):
    assert main(["decode-step", "--preset", "qwen3-0.6b", *more]) == 2
    assert message in capsys.readouterr().err


def test_the_next_command_of_a_process_finds_the_weights(monkeypatch):
    made = []
    monkeypatch.setattr(
        random_models.Models, "make", lambda *given, **rules: made.append(given) or len(made)
    )
    rules = dict(dtype="float32", seed=0)
    find = lambda count=1: random_models.models_of(
        preset("qwen3-0.6b"), ["none", "peagle"], num_devices=count, **rules
    )
    assert [find(), find()] == [1, 2]  # without `keep_models` nothing stays in memory
    monkeypatch.setattr(random_models, "_kept", None)
    random_models.keep_models()
    assert [find(), find()] == [3, 3]
    assert [find(2), find()] == [4, 5]  # the last ones only


@pytest.mark.exhaustive
def test_commands_of_one_process_share_weights_and_find_their_programs(tmp_path):
    """As on two GPUs: rounds, texts, and two replicas, over tiny presets."""
    model = "--preset qwen3-coder-30b-a3b-fp8"
    file, out = tmp_path / "commands", tmp_path / "rows.jsonl"
    file.write_text(
        f"decode-step {model} {TINY_SIZES} --concurrency 2 --tensor-parallel 2\n"
        f"lossless {model} --methods peagle -K 2 --concurrency 2 --tokens 60 --tensor-parallel 2 --max-tokens 20 "
        "--prompt-tokens 30\n\n"
        f"decode-step {model} {TINY_SIZES} --concurrency 2 --replicas 2\n"
    )
    small = ROOT / "tests" / "bench" / "small_presets"
    mine = dict(os.environ)
    mine |= {
        "PYTHONPATH": f"{small}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": CHEAP,
    }  # fmt: skip
    mine.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "bench", "batch", str(file), "--jobs", "2", "--out", str(out)]
    made = subprocess.run(
        [*command, "--sha", "abc"], env=mine, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    rounds, texts, replicas = map(json.loads, out.read_text().splitlines())
    assert [one["kind"] for one in (rounds, texts)] == ["parallel-step", "parallel-lossless"]
    assert (texts["tokens_differing"], texts["tensor_parallel"]) == (0, 2)
    assert (replicas["replicas"], replicas["concurrency"]) == (2, 2)
    assert len(replicas["ms_per_round_of_replicas"]) == 2
    kept = list((tmp_path / "peagle-jax" / "programs").iterdir())
    assert f"{len(kept)} programs compiled by 2 processes" in made.stderr  # nothing compiled later
    assert shlex.split(rounds["command"])[:2] == ["peagle-bench", "decode-step"]
