"""Programs of cells that several processes compile."""

import json
import os
from dataclasses import replace

import jax
import pytest

from bench import presets
from bench.__main__ import PROGRAM, main
from bench.cells import Variant, cells_config
from lab import cell_programs
from lab.cell_programs import Work, compile_all, work_of
from peagle_jax.cli import runs
from peagle_jax.engine.device.compilation import Failure, Progress
from peagle_jax.engine.device.program import WriteControls
from peagle_jax.engine.device.stored_programs import StoredPrograms
from peagle_jax.method import step
from tests import tiny
from tests.waiting import eventually


def test_what_is_not_compiled_is_said(monkeypatch):
    said, kept = [], []

    def compile_missing(recipes, missing, *, jobs, must_end, report, on_ready):
        assert (missing, jobs) == ([None, None], 2)
        assert kept == [
            os.environ.get("XDG_CACHE_HOME")
        ]  # children use the folders of this process
        report(Progress(3, 4, 1.0))
        eventually(must_end)
        return {
            (0, WriteControls()): Failure("too large"),
            (1, None): Failure("ConfigError: no pages"),
        }

    monkeypatch.setattr(cell_programs, "compile_missing", compile_missing)
    monkeypatch.setattr("peagle_jax.cli.runs.keep_compiled_programs", kept.append)
    work = [Work(print, None, (Variant("peagle", 7), (2,))), Work(print, None, ("none", 4))]
    compile_all(work, 2, said.append, seconds=0.1)
    assert said.pop().startswith("2 programs compiled by 2 processes in ")
    assert said == [
        "not compiled beforehand: peagle K=7 at (2,): the program of controls: too large",
        "not compiled beforehand: none at 4: the list of programs: ConfigError: no pages",
        "1 programs are left, which compile one after another",
    ]


def test_engines_with_other_batch_buckets_share_the_files_of_programs(tmp_path):
    sizes = dict(max_num_seqs=4, max_model_len=64, programs_folder=tmp_path)
    weights, chips = jax.tree.structure(0), jax.devices()[:1]
    stored = lambda some: StoredPrograms(weights, cells_config(some, **sizes), chips, {})
    files = {stored(some).path_of("round", (), {}) for some in ((4,), (1, 4))}
    assert len(files) == 1
    assert None not in files


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "decode-step --method none --prompt-tokens 20",
        "decode-step --method peagle -K 2 --tensor-parallel 2 --prompt-tokens 20",
        "lossless --methods peagle -K 2 --tokens 16",
    ],
)
def test_programs_that_are_compiled_beforehand_are_not_traced_again(tmp_path, monkeypatch, command):
    monkeypatch.setitem(
        presets.PRESETS, "tiny", replace(tiny.TARGET, hidden_size=64, intermediate_size=64)
    )
    monkeypatch.setattr(presets, "PEAGLE_LAYERS", 1)
    for name in ("keep_compiled_programs", "programs_folder"):
        monkeypatch.setattr(runs, name, lambda home: tmp_path / "programs")
    out = tmp_path / "rows.jsonl"
    argv = f"{command} --preset tiny --layers 1 --prefill-chunk 16 --concurrency 2 --max-tokens 8"
    argv = [*argv.split(), "--out", str(out), "--sha", "abc"]
    for one in work_of(PROGRAM.parse(argv)[1]):
        programs, state, keys = one()
        for key in programs.not_on_disk(keys, state):
            programs.store(key, state)
    monkeypatch.setattr(step, "speculative_step", None)  # a trace of a round would call it
    assert main(argv) == 0
    assert json.loads(out.read_text())["method"] in argv
