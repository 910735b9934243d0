"""The command in this process, and the folders it is tried on."""

import filecmp
from dataclasses import replace
from pathlib import Path

import pytest

from convert.__main__ import main
from convert.synthetic import write_synthetic
from peagle_jax.cli.model_folders import embedded
from peagle_jax.presets import PRESETS
from tests import memory

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]
TINY_MOE = replace(
    PRESETS["qwen3-coder-30b-a3b"], vocab_size=512, hidden_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, intermediate_size=128, eos_ids=(2,), bos_id=None,
    experts=replace(PRESETS["qwen3-coder-30b-a3b"].experts, num_experts=4, top_k=2),
)  # fmt: skip
TINY_OSS = replace(
    PRESETS["gpt-oss-20b"], vocab_size=512, hidden_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, intermediate_size=128, eos_ids=(2,), bos_id=None, sliding_windows=(128, None),
    experts=replace(PRESETS["gpt-oss-20b"].experts, num_experts=4),
)  # fmt: skip


def target_of(name: str) -> Path:
    """The golden target that a golden head was made for; both have width 64 and 256 tokens."""
    return (
        GOLDEN / "qwen3"
        if name in ("peagle-norms", "peagle-pruned", "peagle-qwen3")
        else GOLDEN / "llama"
    )


def checkpoints() -> dict[str, tuple[Path, list[str]]]:
    """Every checkpoint at hand: its folder, and the options it needs."""
    found = {}
    for path in sorted(GOLDEN.glob("*/model.safetensors")):
        name = path.parent.name
        is_head = name.startswith(("peagle", "eagle"))
        found[name] = (path.parent, ["--target", str(target_of(name))] if is_head else [])
    found["embedded target"] = (embedded("target"), [])
    for name in ("peagle", "eagle3"):
        found[f"embedded {name}"] = (embedded(name), ["--target", str(embedded("target"))])
    return found


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (first, second)]
    if names[0] != names[1]:
        return False
    _, different, unreadable = filecmp.cmpfiles(first, second, names[0], shallow=False)
    return not different and not unreadable


@pytest.fixture
def tmp_path():
    with memory.folder() as path:
        yield path


@pytest.fixture
def cli(capsys):
    """Runs `peagle-convert`: `(exit code, stdout, stderr)`."""

    def call(*argv) -> tuple[int, str, str]:
        try:
            code = main([str(item) for item in argv])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A small FP8 mixture of experts in three shards with an index."""
    folder = tmp_path / "sharded"
    write_synthetic(folder, TINY_MOE, quantization="fp8", shard_bytes=600_000)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder
