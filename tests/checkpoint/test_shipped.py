"""Heads that ship with the package are found by their target."""

import json

import pytest

from convert.__main__ import main as convert
from peagle_jax.checkpoint import save_head, save_target, shipped
from peagle_jax.cli import model_folders
from peagle_jax.cli.loading import load_weights
from peagle_jax.config import ConfigError
from tests import tiny

NAME = "somebody/tiny-model"


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A folder of a target, for which the package has a head."""
    save_target(tiny.target(), tmp_path / "target", dtype="float32")
    heads = tmp_path / "heads"
    save_head(tiny.head(), heads / "tiny" / "peagle", max_position=64)
    described = {"digest": shipped.digest(tmp_path / "target"), "hub_ids": [NAME]}
    (heads / "tiny" / "target.json").write_text(json.dumps(described))
    monkeypatch.setattr(shipped, "HEADS", heads)
    return tmp_path / "target"


def test_a_model_alone_is_enough(target):
    model, head, _ = load_weights(target, None, method=None, dtype="float32")
    assert (model.config.vocab_size, head.config.method) == (tiny.TARGET.vocab_size, "peagle")
    folder = shipped.HEADS / "tiny" / "peagle"
    assert model_folders.local_models(target, None, None) == (target, folder)
    assert model_folders.local_models(target, None, "none") == (target, None)
    with pytest.raises(ConfigError, match="drafting needs a head"):
        model_folders.local_models(target, None, "eagle3")


def test_the_format_of_weights_changes_no_digest_and_another_target_does(target, tmp_path):
    other = tiny.target(seed=7)
    other.norm.weight.set_value(other.norm.weight[...] * 1.5)
    save_target(other, tmp_path / "other", dtype="float32")
    assert shipped.shipped_heads(target)
    assert not shipped.shipped_heads(tmp_path / "other")
    save_target(tiny.target(), tmp_path / "bfloat16", dtype="bfloat16")
    save_target(
        load_weights(tmp_path / "bfloat16", None, method="none", dtype="float32")[0],
        tmp_path / "float32",
        dtype="float32",
    )
    assert shipped.digest(tmp_path / "bfloat16") == shipped.digest(tmp_path / "float32")


def test_a_hub_id_without_a_head_is_refused_before_its_download(target):
    assert shipped.has_shipped_heads(NAME)
    with pytest.raises(
        ConfigError, match=r"needs a head for some/other \(no folder here, so the id of a hub\)"
    ):
        model_folders.local_models("some/other", None, None)


def test_a_converted_folder_finds_them_and_another_head_stands_in(target, tmp_path):
    converted = tmp_path / "converted"
    assert convert(["convert", str(target), str(converted)]) == 0
    assert shipped.shipped_heads(converted).keys() == {"peagle"}
    (shipped.HEADS / "tiny" / "peagle").rename(shipped.HEADS / "tiny" / "eagle3")
    assert model_folders.head_of(target, None).name == "eagle3"
    with pytest.raises(ConfigError, match="needs a head for my-model"):
        model_folders.head_of(target, "peagle", name="my-model")
