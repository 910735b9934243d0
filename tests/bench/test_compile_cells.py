"""Programs of cells that several processes compile."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from bench import compile_cells, random_models
from bench.cells import CellsConfig, Variant, most_drafts, variants
from bench.commands.decode_step import Options
from bench.compile_cells import Work, compile_all
from bench.random_models import Models
from peagle_jax.engine.device.compilation import Failure, Progress
from peagle_jax.engine.device.round_shapes import round_shapes
from peagle_jax.engine.device.stored_programs import StoredPrograms, keep_in
from tests import tiny
from tests.waiting import eventually

SIZES = "--preset qwen3-0.6b --layers 1 --page-size 8 --prefill-chunk 16 --prompt-tokens 20 --max-tokens 8 --prefills 1"
ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_jobs_are_processes(tmp_path):
    """Over a tiny preset."""
    out = tmp_path / "rows.jsonl"
    options = f"{SIZES} --variants none --concurrency 1 --jobs 2 --sha abc --out {out}"
    command = [sys.executable, "-m", "bench", "decode-step", *options.split()]
    small = ROOT / "tests" / "bench" / "small_presets"
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": f"{small}{os.pathsep}{ROOT}",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    made = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "3 programs compiled by 2 processes" in made.stderr
    assert len(out.read_text().splitlines()) == 1


def test_what_is_not_compiled_is_said(monkeypatch):
    said, kept = [], []

    def compile_missing(recipes, missing, *, jobs, must_end, report, on_ready):
        assert (missing, jobs) == ([None, None], 2)
        assert kept == [
            os.environ.get("XDG_CACHE_HOME")
        ]  # children use the folders of this process
        report(Progress(3, 4, 1.0))
        eventually(must_end)
        return {(0, "prefill"): Failure("too large"), (1, None): Failure("ConfigError: no pages")}

    monkeypatch.setattr(compile_cells, "compile_missing", compile_missing)
    monkeypatch.setattr("peagle_jax.cli.runs.keep_compiled_programs", kept.append)
    work = [Work(print, None, (Variant("peagle", 7), (2,))), Work(print, None, ("none", 4))]
    compile_all(work, 2, said.append, seconds=0.1)
    assert said.pop().startswith("2 programs compiled by 2 processes in ")
    assert said == [
        "not compiled beforehand: peagle K=7 at (2,): the program of prefill: too large",
        "not compiled beforehand: none at 4: the list of programs: ConfigError: no pages",
        "1 programs are left, which compile one after another",
    ]


def test_engines_with_other_batch_buckets_share_the_files_of_programs(tmp_path):
    sizes = dict(max_num_seqs=4, max_model_len=64)
    keep_in(tmp_path)
    try:
        files = {
            StoredPrograms(
                jax.tree.structure(0),
                CellsConfig(concurrencies=some, **sizes),
                jax.devices()[:1],
                {},
            ).path_of("round", (), {})
            for some in ((4,), (1, 4))
        }
    finally:
        keep_in(None)
    assert len(files) == 1
    assert None not in files


def test_a_fixed_k_beside_a_choice_of_k_runs_the_programs_of_the_choice(monkeypatch):
    """Rounds of K = 3 compile once, with room for the seven drafts that a choice may make."""
    written = ("none", "peagle:7:load", "peagle:3", "eagle3:3", "peagle:7")
    options = Options(preset="tiny", variants=written, prompt_tokens=8, max_tokens=8, page_size=8)
    assert [most_drafts(options, variant) for variant in variants(options)] == [0, 7, 7, 3, 7]
    assert most_drafts(replace(options, variants=("peagle:3",)), Variant("peagle", 3)) == 3
    made = {}
    monkeypatch.setattr(random_models, "Engine", lambda *args, **kw: made.update(config=args[2]))
    models = SimpleNamespace(
        heads=dict.fromkeys(("peagle", "eagle3"), object()), target=None, dtype="float32",
        num_devices=1, has_shapes_only=False, preset=SimpleNamespace(target=tiny.TARGET),
        drafter=lambda *args: None,
    )  # fmt: skip
    by_variant = {}
    for variant in variants(options):
        Models.engine(models, options, variant, (2, 4))
        config = by_variant[variant] = made["config"]
        if variant.adaptive == "off":
            assert {config.first_num_draft(size) for size in (2, 4)} == {variant.num_draft}
    loaded, fixed = by_variant[Variant("peagle", 7, "load")], by_variant[Variant("peagle", 3)]
    assert replace(fixed, draft_schedule=(), adaptive="load") == loaded
    drafts = {shape.num_draft for shape in round_shapes(fixed)}
    assert drafts == {3} < {shape.num_draft for shape in round_shapes(loaded)}
