"""Every checkpoint converted, verified, restored by plain Orbax, exported byte for byte."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from convert.source import open_source
from peagle_jax.checkpoint import Checkpoint, CheckpointError
from peagle_jax.checkpoint.converted import Converted, is_converted, joined, open_checkpoint
from peagle_jax.checkpoint.safetensors import write
from tests.convert.conftest import checkpoints

CHECKPOINTS = checkpoints()


def source_of(folder: Path, options: list[str]):
    return open_source(folder, target=Path(options[1]) if options else None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "qwen3_moe-fp8", "gemma4", "embedded peagle"])
def test_plain_orbax_restores_what_the_rules_make(name, cli, tmp_path):
    folder, options = CHECKPOINTS[name]
    cli("convert", folder, tmp_path / "dst", *options)
    checkpoint, converted = Checkpoint(folder), Converted(tmp_path / "dst")
    restored = {}
    for group in (tmp_path / "dst" / "weights").iterdir():
        restored[group.name] = ocp.PyTreeCheckpointer().restore(group)
    for rule in source_of(folder, options).layout.rules:
        want = np.ascontiguousarray(joined(checkpoint, rule))
        got = restored[converted.parameters[rule.path].group]
        for part in rule.path:
            got = got[str(part)]
        for array in (got, joined(converted, rule)):
            assert (array.dtype, array.shape) == (want.dtype, want.shape)
            assert array.tobytes() == want.tobytes()


def test_a_converted_folder_reads_like_its_source(cli, tmp_path):
    folder, options = CHECKPOINTS["embedded eagle3"]
    assert not is_converted(folder)
    assert isinstance(open_checkpoint(folder), Checkpoint)
    cli("convert", folder, tmp_path / "dst", *options)
    assert is_converted(tmp_path / "dst")
    checkpoint, converted = Checkpoint(folder), open_checkpoint(tmp_path / "dst")
    assert isinstance(converted, Converted)
    assert converted.names() == checkpoint.names()
    assert converted.tensors == checkpoint.tensors
    assert "d2t" in converted
    for name in ("d2t", "t2d", "norm.weight"):  # the first is a parameter, the second is not used
        assert converted.info(name) == checkpoint.info(name)
        assert np.array_equal(converted.read(name), checkpoint.read(name))
    with pytest.raises(CheckpointError, match=r"'nothing' is missing"):
        converted.read("nothing")
    with pytest.raises(CheckpointError, match=r"only there as a part of first\.attention\.qkv"):
        converted.read("midlayer.self_attn.q_proj.weight")


def test_side_files_are_copied_and_the_manifest_tells_all(cli, tmp_path):
    folder, _ = CHECKPOINTS["embedded target"]
    cli("convert", folder, tmp_path / "dst")
    for path in folder.iterdir():
        if path.suffix == ".json":
            assert (tmp_path / "dst" / path.name).read_bytes() == path.read_bytes()
    manifest = json.loads((tmp_path / "dst" / "manifest.json").read_text())
    assert manifest["source"]["name"] == "target"
    assert manifest["source"]["files"][0]["name"] == "model.safetensors"
    assert {"python", "orbax-checkpoint", "tensorstore", "jax"} <= manifest["tool"].keys()
    tensors = Checkpoint(folder).tensors
    assert manifest["tensors"].keys() == tensors.keys()
    assert all(len(entry["sha256"]) == 64 for entry in manifest["tensors"].values())
    assert all(len(entry["sha256"]) == 64 for entry in manifest["parameters"])
    used = {name for entry in manifest["parameters"] for name in entry["names"]}
    assert used == tensors.keys()


def test_a_model_without_its_head_is_converted(cli, tmp_path):
    """As `AutoModel` saves a model whose lm_head is its embedding: names without a prefix."""
    source, bare = Checkpoint(CHECKPOINTS["qwen2"][0]), tmp_path / "src"
    bare.mkdir()
    (bare / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    held = {n.removeprefix("model."): source.read(n) for n in source.names()}
    write(bare / "model.safetensors", held)
    assert cli("convert", bare, tmp_path / "dst")[0] == 0
    code, out, err = cli("verify", bare, tmp_path / "dst")
    assert (code, err) == (0, "")
    assert "every bit is right" in out
