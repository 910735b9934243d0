"""A converted folder is a model folder: it loads to the same weights and writes the same text."""

import jax
import numpy as np
import pytest
from flax import nnx

from convert.__main__ import main
from peagle_jax.__main__ import main as generate
from peagle_jax.checkpoint import CheckpointError, load_head, load_target, target_config
from peagle_jax.cli.model_folders import embedded
from tests import programs
from tests.convert.conftest import GOLDEN, target_of

TARGETS = ("gemma4", "gpt_oss-bf16", "gpt_oss-mxfp4", "llama-fp8-tensor", "qwen3_moe-fp8")


def same_weights(first: nnx.Module, second: nnx.Module) -> bool:
    pairs = [jax.tree.leaves_with_path(nnx.state(model)) for model in (first, second)]
    paths = [[path for path, _ in leaves] for leaves in pairs]
    return paths[0] == paths[1] and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for (_, a), (_, b) in zip(*pairs, strict=True)
    )


@pytest.mark.sampled(2, slow=2)
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_the_same_weights(name, cli, tmp_path):
    cli("convert", GOLDEN / name, tmp_path / "dst")
    assert target_config(tmp_path / "dst") == target_config(GOLDEN / name)
    models = [load_target(folder, dtype="bfloat16") for folder in (GOLDEN / name, tmp_path / "dst")]
    assert same_weights(*models)


@pytest.mark.parametrize("name", ["peagle-pruned", "eagle31"])
def test_a_head_has_the_same_weights(name, cli, tmp_path):
    target = target_config(target_of(name))
    cli("convert", GOLDEN / name, tmp_path / "dst", "--target", target_of(name))
    folders = (GOLDEN / name, tmp_path / "dst")
    assert same_weights(*(load_head(folder, target, dtype="float32") for folder in folders))


def test_a_folder_of_another_version_is_refused_by_its_parameter(cli, tmp_path):
    cli("convert", GOLDEN / "llama", tmp_path / "dst")
    manifest = tmp_path / "dst" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"transform":"concatenate"', '"transform":"x"')
    )
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.attention\.qkv\.weight is missing or was"
    ):
        load_target(tmp_path / "dst", dtype="float32")


@pytest.mark.slow
def test_text_is_generated_from_converted_folders(tmp_path, capsys):
    target, head = str(tmp_path / "target"), str(tmp_path / "head")
    assert main(["convert", str(embedded("target")), target]) == 0
    assert main(["convert", str(embedded("peagle")), head, "--target", target]) == 0
    capsys.readouterr()
    options = ["def add(a, b):", "--max-tokens", "12", "-K", "3", "--no-cache"]
    texts = []
    with programs.shared():
        for where in ([], ["--model", target, "--drafter", head]):
            assert generate([*options, *where]) == 0
            texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def add(a, b):")
