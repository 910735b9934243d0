"""Tensors of one parameter that have different dtypes: every command and loading refuse them in one line."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from peagle_jax.checkpoint import Checkpoint, CheckpointError, load_target
from peagle_jax.checkpoint.safetensors import write
from tests.convert.conftest import GOLDEN
from tests.convert.test_refused import refused

F16, BF16, F32 = map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32))


def with_dtypes(name: str, folder: Path, dtypes: dict[str, np.dtype]) -> Path:
    """A golden checkpoint whose tensors of layer 1 that end so are stored in other dtypes."""
    shutil.copytree(GOLDEN / name, folder)
    tensors = {n: np.array(x) for n, x in zip(*_contents(folder), strict=True)}
    for end, dtype in dtypes.items():
        full = next(n for n in tensors if ".layers.1." in n and n.endswith(end))
        tensors[full] = tensors[full].astype(dtype)
    write(folder / "model.safetensors", tensors)
    return folder


def _contents(folder: Path):
    checkpoint = Checkpoint(folder)
    return checkpoint.names(), [np.array(checkpoint.read(name)) for name in checkpoint.names()]


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
MIXES = {
    "q wider than k and v": ("qwen3", dict(zip(QKV, (F32, F16, F16), strict=True))),
    "q and k of one width": ("qwen3", dict(zip(QKV, (BF16, F16, F16), strict=True))),
    "gate wider than up": ("llama", {"gate_proj.weight": F32, "up_proj.weight": BF16}),
    "one bias": ("gpt_oss-bf16", {"k_proj.bias": F16}),
    "one expert": ("qwen3_moe-bf16", {"experts.2.down_proj.weight": F16}),
    "one scale": ("qwen3-fp8-channel", {"v_proj.weight_scale": F16}),
}


@pytest.mark.parametrize("mix", MIXES)
def test_one_parameter_of_two_dtypes_is_refused_wherever_it_is_read(mix, cli, tmp_path):
    name, dtypes = MIXES[mix]
    folder = with_dtypes(name, tmp_path / "src", dtypes)
    why = ("the two are one parameter here", "store them in one dtype")
    refused(cli("plan", folder), *why)
    refused(cli("convert", folder, tmp_path / "dst"), *why)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(CheckpointError, match=f"{folder}: .*the two are one parameter"):
            load_target(folder, dtype=dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes", [{"dtype": "F32"}, {"dtype": "F16"}, {"shape": [1]}, {"shape": [64, 64]}]
)
def test_a_manifest_that_describes_other_arrays_than_its_tensors_make_is_refused(
    changes, cli, tmp_path
):
    src, dst = GOLDEN / "gpt_oss-mxfp4", tmp_path / "dst"
    assert cli("convert", src, dst)[0] == 0
    path = dst / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = next(one for one in manifest["parameters"] if one["path"][-2:] == ["qkv", "bias"])
    entry.update(changes)
    path.write_text(json.dumps(manifest))
    code, _, err = cli("verify", src, dst, "--no-logits")
    assert code == 1
    assert "layers.0.attention.qkv.bias in weights/0000 differs from the source: it is" in err
    refused(cli("export", dst, tmp_path / "back"), "qkv.bias was made by other rules")
    with pytest.raises(CheckpointError, match=r"qkv\.bias is missing or was converted in another"):
        load_target(dst, dtype="float32")


@pytest.mark.parametrize(
    "changes", [{"end": "all"}, {"begin": None}, {"shape": [-1, 4]}, {"dtype": "F7"}, {"end": 3}]
)
def test_a_manifest_with_tensors_that_cannot_be_is_refused(changes, cli, tmp_path):
    src, dst = GOLDEN / "llama", tmp_path / "dst"
    assert cli("convert", src, dst)[0] == 0
    path = dst / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["model.norm.weight"].update(changes)
    path.write_text(json.dumps(manifest))
    refused(cli("export", dst, tmp_path / "back"), "manifest.json", "model.norm.weight")
