"""A round and experts compile for every TPU generation, a prefill for one, in place and without
copies of weights.

There need be no TPU: see `lab.deviceless_tpu`, which is run once for a chip. Nothing runs, so
neither numbers nor speed are tested.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab import deviceless_tpu

# The first test of a chip compiles all of its programs: a minute on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PROGRAMS = {
    "v5e": ("round", "experts"),
    "v6e": ("experts",),  # another test compiles the round and the prefill of GPT-OSS
    "7x": ("round", "experts"),
}
SIZES = ("--preset=qwen3-0.6b", "--layers=2", "--k=3", "--max-model-len=2048")
_ROOT = Path(__file__).parents[2]
_MIB = 2**20


@functools.cache
def compiled(chip: str, folder: Path) -> dict[str, dict]:
    """Programs by name."""
    return run(chip, folder, *SIZES, *(f"--program={x}" for x in PROGRAMS[chip]))


def run(chip: str, folder: Path, *options: str) -> dict[str, dict]:
    """Programs by name; in a process of its own, as libtpu and jax are set up for compiling
    only."""
    found = folder / f"{chip}.json"
    options = ["--chip", chip, "--json", found, *options]
    process = subprocess.run(
        [sys.executable, "-m", "lab.deviceless_tpu", *options],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {one["program"]: one for one in json.loads(found.read_text())}


def on(chip: str):
    """A chip; with `--dist loadgroup` its tests share a worker."""
    return pytest.param(chip, id=f"@{chip}")


@pytest.fixture(params=map(on, PROGRAMS))
def made(request, tmp_path_factory) -> dict[str, dict]:
    """The programs of one chip."""
    if lacking := deviceless_tpu.missing():
        pytest.skip(lacking)
    return compiled(request.param, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("made", [on("v5e"), on("7x")], indirect=True)
def test_a_program_works_in_place_and_copies_no_weight(made):
    """Two layers of Qwen3-0.6B at full width, and a head of one layer."""
    one = made["round"]
    assert one["aliased_bytes"] >= one["cache_bytes"] > 0
    assert one["largest_copy"] < _MIB < one["smallest_matrix"]
    assert one["temporary_bytes"] < 64 * _MIB


@pytest.mark.parametrize("chip", [on("v6e")])
def test_weights_lie_as_the_round_and_the_prefill_want_them(chip, tmp_path):
    """One layer of GPT-OSS-20B. In default layouts a round copies both embeddings, 1.2 GB each. The
    branches of sampled requests, which take most of the compiler's time, read no weight."""
    if lacking := deviceless_tpu.missing():
        pytest.skip(lacking)
    sizes = ("--preset=gpt-oss-20b", "--layers=1", "--k=3", "--concurrency=8", "--greedy")
    made = run(chip, tmp_path, *sizes, "--max-model-len=2048")
    assert made.keys() == {"round", "prefill"}
    for one in made.values():
        assert one["aliased_bytes"] >= one["cache_bytes"] > 0, one
        # A layer's keys of heads 64 wide are copied: 17 MB. The smallest projection has 24 MB.
        assert one["largest_copy"] < 20 * _MIB, one
        assert one["temporary_bytes"] < 256 * _MIB, one


def test_experts_are_neither_copied_nor_unpacked_in_memory(made):
    """What is unpacked would be twice (fp8) or four times (mxfp4) the packed experts."""
    experts = [one for name, one in made.items() if name.startswith("experts")]
    assert len(experts) == 2 * len(deviceless_tpu.EXPERTS)
    for one in experts:
        # Scales of MXFP4 may be: they are 17 MB of 282 on a TPU 7x.
        assert one["largest_copy"] < 32 * _MIB < one["smallest_matrix"], one
        assert one["temporary_bytes"] < 32 * _MIB, one
