"""A head with a selector: saved, loaded, converted, exported; and saved without the selector."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.checkpoint import Checkpoint, CheckpointError, load_head, save_head, target_config
from peagle_jax.method.draft_head import selector_class
from peagle_jax.training.selector import with_selector
from peagle_jax.training.trainer import split_model
from tests import tiny
from tests.convert.conftest import GOLDEN, same_files

RANK = 3


@pytest.fixture(scope="module")
def target():
    return target_config(GOLDEN / "qwen3")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A golden head with a random selector."""
    head = load_head(GOLDEN / "peagle-qwen3", target, dtype="float32")
    config = replace(head.config, selector_rank=RANK)
    selector = selector_class(config)(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    selector = tiny.loud(selector, 1, vectors=True)
    made = tmp_path_factory.mktemp("selector")
    with_it = with_selector(head, selector, RANK)
    save_head(with_it, made / "head", max_position=target.max_position, dtype="float32")
    save_head(
        with_it, made / "plain", max_position=target.max_position, dtype="float32", selector=False
    )
    return made


def plain_tensors(folder) -> set[str]:
    return set(Checkpoint(folder / "plain").tensors)


def test_a_selector_is_saved_and_loaded(folder, target):
    head = load_head(folder / "head", target, dtype="float32")
    assert head.config.selector_rank == RANK
    stored = Checkpoint(folder / "head")
    weights = split_model(head.selector)[0]
    assert {f"selector.{name}" for name in weights} == set(stored.tensors) - plain_tensors(folder)
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, stored.read(f"selector.{name}"))


def test_a_head_saved_without_its_selector_is_one_that_never_had_it(folder, target):
    plain, raw = (
        Checkpoint(folder / "plain"),
        json.loads((folder / "plain/config.json").read_text()),
    )
    assert not any(name.startswith("selector") for name in plain.tensors)
    assert "selector_rank" not in raw
    assert load_head(folder / "plain", target, dtype="float32").selector is None


def test_a_converted_selector_is_verified_and_exported(folder, cli, tmp_path):
    options = ("--target", GOLDEN / "qwen3")
    assert cli("convert", folder / "head", tmp_path / "dst", *options)[0] == 0
    code, out, _ = cli("verify", folder / "head", tmp_path / "dst", *options)
    assert code == 0
    assert "every bit is right" in out
    assert cli("export", tmp_path / "dst", tmp_path / "back")[0] == 0
    assert same_files(folder / "head", tmp_path / "back")


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (RANK + 1, r"selector\.\S+ has shape"),
        (None, "without a place"),
        (-1, "selector_rank"),
    ],
)
def test_a_selector_that_contradicts_its_config_is_refused(folder, target, tmp_path, rank, message):
    raw = json.loads((folder / "head" / "config.json").read_text())
    raw = (
        {**raw, "selector_rank": rank}
        if rank
        else {k: v for k, v in raw.items() if k != "selector_rank"}
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folder / "head" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, target, dtype="float32")
