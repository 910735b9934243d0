"""Programs of cells that several processes compile."""

import os
import subprocess
import sys

import jax
import pytest

from bench.cells import CellsConfig
from peagle_jax.engine.stored_programs import StoredPrograms, keep_in


@pytest.mark.slow
def test_jobs_are_processes(tmp_path):
    argv = [
        "--preset",
        "qwen3-0.6b",
        "--layers",
        "1",
        "--page-size",
        "8",
        "--prefill-chunk",
        "16",
        "--prompt-tokens",
        "20",
        "--variants",
        "none",
        "--jobs",
        "2",
    ]
    argv += ["--concurrency", "1", "--max-tokens", "8", "--prefills", "1", "--sha", "abc"]
    command = [
        sys.executable,
        "-m",
        "bench",
        "decode-step",
        *argv,
        "--out",
        tmp_path / "rows.jsonl",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    made = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "3 programs compiled by 2 processes" in made.stderr
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


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
