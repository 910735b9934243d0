"""Programs of cells that several processes compile."""

import os

import jax

from bench import cells
from bench.cells import Variant, Work, cells_config, compile_all
from peagle_jax.engine.device.compilation import Failure, Progress
from peagle_jax.engine.device.program import WriteControls
from peagle_jax.engine.device.stored_programs import StoredPrograms
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

    monkeypatch.setattr(cells, "compile_missing", compile_missing)
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
