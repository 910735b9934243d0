"""A conversion takes a few copies of its largest parameter, however large the model is."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bench.presets import with_layers
from convert.plan import make_plan
from convert.source import open_source
from peagle_jax.checkpoint.tables import target_tensors
from peagle_jax.checkpoint.target_writer import target_json
from peagle_jax.presets import PRESETS
from tests.convert.conftest import ROOT

RUN = """
import sys
from convert.__main__ import main
code = main(sys.argv[1:])
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
sys.exit(code)
"""


def peak_of(*argv) -> int:
    """Most resident bytes of a process that runs the command."""
    command = [sys.executable, "-c", RUN, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout.splitlines()[-1])


def write_zeros(folder: Path) -> int:
    """A target of zeros, which take no room on disk; returns its bytes."""
    config = replace(
        with_layers(PRESETS["qwen3-coder-30b-a3b"], 4),
        vocab_size=30_000,
        eos_ids=(2,),
        bos_id=1,
        experts=replace(PRESETS["qwen3-coder-30b-a3b"].experts, num_experts=40),
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target_json(config, "bfloat16")))
    header, end = {}, 0
    for name, info in target_tensors(config, np.dtype(ml_dtypes.bfloat16)).items():
        begin, end = end, end + 2 * int(np.prod(info.shape))
        header[name] = {"dtype": "BF16", "shape": info.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.slow
def test_a_large_checkpoint_is_converted_verified_and_exported_in_little_memory(tmp_path):
    src, dst = tmp_path / "src", tmp_path / "dst"
    nbytes = write_zeros(src)
    most = make_plan(open_source(src)).peak_bytes
    assert most < nbytes
    for argv in (("convert", src, dst), ("verify", src, dst), ("export", dst, tmp_path / "back")):
        assert peak_of(*argv) < 1.1 * most, argv[0]
