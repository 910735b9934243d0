"""The command in this process, and the folders it is tried on."""

import filecmp
import json
import shutil
from pathlib import Path

import pytest

from convert.__main__ import main
from peagle_jax.checkpoint.safetensors import INDEX, Checkpoint, write
from peagle_jax.cli.model_folders import embedded
from tests import memory

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]


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
        is_head = name.startswith(("peagle", "eagle", "dflash", "dspark"))
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


def shard(name: str, folder: Path, num_shards: int) -> Path:
    """A golden checkpoint in several files with an index, the output's weight in the last."""
    checkpoint, files = Checkpoint(GOLDEN / name), {}
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(checkpoint.names())
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[len(names) * i // num_shards : len(names) * (i + 1) // num_shards]
        write(folder / file, {one: checkpoint.read(one) for one in part})
        files |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A small FP8 mixture of experts in three shards with an index."""
    return shard("qwen3_moe-fp8", tmp_path / "sharded", 3)
