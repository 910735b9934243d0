"""A conversion's memory does not grow with the model."""

import subprocess
import sys
from dataclasses import replace

import pytest

from convert.plan import make_plan
from convert.source import open_source
from convert.synthetic import with_layers, write_synthetic
from peagle_jax.presets import PRESETS
from tests.convert.conftest import ROOT

CONVERT, COMPARE = 600_000_000, 900_000_000
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


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(
    ("preset", "quantization"), [("gpt-oss-20b", "mxfp4"), ("qwen3-coder-30b-a3b", "fp8")]
)
def test_a_large_checkpoint_is_converted_verified_and_exported_in_little_memory(
    preset, quantization, tmp_path
):
    config = replace(with_layers(PRESETS[preset], 3), vocab_size=30_000, eos_ids=(2,), bos_id=1)
    src, dst = tmp_path / "src", tmp_path / "dst"
    nbytes = write_synthetic(src, config, quantization=quantization, sparse=True)
    assert nbytes > 1.5e9
    estimate = make_plan(open_source(src)).peak_bytes
    assert estimate < CONVERT
    assert peak_of("convert", src, dst) < min(CONVERT, 1.2 * estimate)
    assert peak_of("verify", src, dst, "--no-logits") < COMPARE
    assert peak_of("export", dst, tmp_path / "back") < COMPARE
