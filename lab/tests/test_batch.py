"""`python -m lab batch`: commands of a file within a time, and the files of commands."""

import json
import os
import shlex
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import jax
import pytest

from bench import lossless, models, serve_load
from bench.presets import preset
from bench.rows import DATA
from lab import batch
from lab.__main__ import main
from lab.batch import BatchOptions, Part, parts_of
from lab.cell_programs import Shapes
from peagle_jax.config import ConfigError
from peagle_jax.parallel.shares import check_shares
from serving.sources import resolve
from tests.suite import CHEAP
from tests.waiting import LIMIT

LAB_DATA = Path(batch.__file__).parent / "data"
TWO_GPUS = LAB_DATA / "two_gpus.txt"
ONE_GPU = LAB_DATA / "one_gpu.txt"
SERVED = DATA / "served.txt"
TINY_SIZES = "--method peagle -K 2 --temperature 0 --prompt-tokens 24 --max-tokens 24"
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
    """Processes that would have run: the first command and the limit of each. Each takes 30 s; the
    second fails."""
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
        "# at most 7 s\ndecode-step --preset qwen3-0.6b\n\nlossless\n\n"
        "decode-step --preset qwen3-0.6b\n"
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
    """The file of the sleeping process is open in it alone, so that the end of the pipe is its
    end."""
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
    assert batch._run(Part(lines=(("report",),), seconds=0.1), 0.1, os.environ) == 124
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


@cache
def bytes_of(name: str) -> int:
    """Weights of a preset and its head, by their shapes."""
    made = Shapes.of(preset(name), ["peagle"], dtype="bfloat16")
    leaves = jax.tree.leaves((made.target, made.heads))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_the_commands_for_two_gpus_fit_and_divide():
    parts, memory_bytes = parts_of(TWO_GPUS.read_text()), 139 * 2**30
    commands = [(part, batch._parsed(line)) for part in parts for line in part.lines]
    for part, options in commands:
        share = float(dict(part.environment).get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        chosen = preset(options.preset)
        head = chosen.head("peagle")
        size = options.tensor_parallel
        for config in (chosen.target, head):
            check_shares(config, size)
        held = bytes_of(options.preset)
        assert held / size < 0.9 * share * memory_bytes, options.preset
        assert batch.work_of(options)
        if isinstance(options, lossless.Options):
            assert lossless.config_of(options, [[1]], (8,)).tensor_parallel == size
    assert all(part.seconds for part in parts)  # none can take the time of all
    assert [part.is_early for part in parts].index(False) == 1


def test_the_commands_for_one_gpu_name_what_exists():
    parts = parts_of(ONE_GPU.read_text())
    assert all(part.seconds for part in parts)
    for options in [batch._parsed(line) for part in parts for line in part.lines]:
        assert batch.work_of(options)


def test_the_commands_for_served_models_end_in_time_and_keep_the_options_of_the_server(tmp_path):
    file = tmp_path / "rows.jsonl"
    options = BatchOptions(file=SERVED, out=file, sha="abc")
    parts = parts_of(SERVED.read_text())
    assert all(part.seconds <= 700 for part in parts)
    for line in [line for part in parts for line in part.lines]:
        found = batch._parsed(batch._with_file(line, options))
        assert isinstance(found, serve_load.Options)
        assert (found.out, found.sha) == (file, "abc")
        settings, _ = resolve(found.server_options)
        assert settings.max_num_seqs >= (128 if found.rate else max(found.concurrency))
        assert found.prompt_tokens + found.max_tokens <= settings.max_model_len


def test_the_next_command_of_a_process_finds_the_weights(monkeypatch):
    made = []
    monkeypatch.setattr(
        models.Models,
        "random",
        lambda *given, **rules: made.append(given) or len(made),
    )
    rules = dict(dtype="float32")
    find = lambda count=1: models.random_models(
        preset("qwen3-0.6b"), ["none", "peagle"], num_devices=count, **rules
    )
    monkeypatch.setattr(models, "_kept", {})
    assert [find(), find()] == [1, 1]
    assert [find(2), find()] == [2, 3]  # the last ones only


@pytest.mark.exhaustive
def test_commands_of_one_process_share_weights_and_find_their_programs(tmp_path):
    """As on two GPUs: rounds and texts, over tiny presets."""
    model = "--preset qwen3-coder-30b-a3b-fp8"
    file, out = tmp_path / "commands", tmp_path / "rows.jsonl"
    file.write_text(
        f"decode-step {model} {TINY_SIZES} --concurrency 2 --tensor-parallel 2\n"
        f"lossless {model} --methods peagle -K 2 --concurrency 2 --tokens 60 --tensor-parallel 2 "
        "--max-tokens 20 "
        "--prompt-tokens 30\n"
    )
    small = ROOT / "tests" / "bench" / "small_presets"
    paths = f"{small}{os.pathsep}{ROOT}"
    mine = os.environ | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": CHEAP}
    mine |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    mine.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "lab", "batch", str(file), "--jobs", "2", "--out", str(out)]
    made = subprocess.run(
        [*command, "--sha", "abc"], env=mine, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    rounds, texts = map(json.loads, out.read_text().splitlines())
    assert [one["kind"] for one in (rounds, texts)] == ["parallel-step", "parallel-lossless"]
    assert (texts["tokens_differing"], texts["tensor_parallel"]) == (0, 2)
    kept = list((tmp_path / "peagle-jax" / "programs").iterdir())
    assert f"{len(kept)} programs compiled by 2 processes" in made.stderr  # nothing compiled later
    assert shlex.split(rounds["command"])[:2] == ["peagle-bench", "decode-step"]
