"""config.json ties lm_head to the embedding and the file holds both: tied only if they are equal.

transformers does so (`PreTrainedModel.tie_weights`): equal weights are tied, different ones are
both used.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.__main__ import main
from peagle_jax.checkpoint import Checkpoint, CheckpointError, load_target, save_target
from peagle_jax.checkpoint.safetensors import write
from tests.golden.folders import GOLDEN, parts, written
from tests.tiny import logits

UNTIED = ("llama", "gpt_oss-bf16", "gpt_oss-mxfp4", "qwen3_moe-bf16", "qwen3-fp8-channel")
TIED = ("qwen3", "gemma4", "llama-fp8-tensor", "qwen3_moe-fp8")


def copy_of(name: str, folder: Path, *, tied: bool, change=lambda tensors: None) -> Path:
    """A golden folder whose config ties the two weights, and whose tensors are changed."""
    raw, held = parts(name)
    for part in (raw, raw.get("text_config", {})):
        if "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = tied
    change(held)
    return written(folder, raw, held)


def embedding(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))


def both(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The folder, and what `peagle-convert` makes and verifies of it."""
    assert main(["convert", str(folder), str(tmp_path / "dst")]) == 0
    assert main(["verify", str(folder), str(tmp_path / "dst")]) == 0
    return folder, tmp_path / "dst"


def lm_head_of(folder: Path) -> np.ndarray:
    model = load_target(folder, dtype="float32")
    assert not model.config.tie_embeddings
    return np.asarray(model.lm_head.weight)


def test_the_logits_are_those_of_transformers(tmp_path):
    """PyTorch and transformers 5.23, with `tie_word_embeddings`, computed the golden logits."""
    want = load_file(GOLDEN / "expected" / "llama.safetensors")
    folder = copy_of("llama", tmp_path / "src", tied=True)
    for one in both(folder, tmp_path):
        found = logits(load_target(one, dtype="float32"), want["tokens"])
        np.testing.assert_allclose(found, want["logits"], atol=2e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNTIED)
def test_a_different_lm_head_is_used_though_the_config_ties_it(name, tmp_path):
    folder = copy_of(name, tmp_path / "src", tied=True)
    want = Checkpoint(GOLDEN / name).read("lm_head.weight").astype(np.float32)
    for one in both(folder, tmp_path):
        np.testing.assert_array_equal(lm_head_of(one), want)


def last_bit(tensors: dict[str, np.ndarray]) -> None:
    """A copy of the embedding whose last number differs in one bit."""
    head = np.array(embedding(tensors))
    head.view(np.uint8).reshape(-1)[-1] ^= 1
    tensors["lm_head.weight"] = head


def wider(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = embedding(tensors).astype(np.float32) * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [last_bit, wider])
@pytest.mark.parametrize("name", ["gemma4", "qwen3", "qwen3_moe-fp8"])
def test_an_lm_head_that_differs_in_a_bit_or_a_dtype_is_used(name, change, tmp_path):
    folder = copy_of(name, tmp_path / "src", tied=True, change=change)
    want = Checkpoint(folder).read("lm_head.weight").astype(np.float32)
    for one in both(folder, tmp_path):
        np.testing.assert_array_equal(lm_head_of(one), want)


def test_a_model_that_is_not_tied_after_all_is_saved_as_one(tmp_path):
    model = load_target(copy_of("llama", tmp_path / "src", tied=True), dtype="float32")
    save_target(model, tmp_path / "saved", dtype="float32")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["tie_word_embeddings"] is False
    again = load_target(tmp_path / "saved", dtype="float32")
    assert np.array_equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TIED)
def test_an_equal_lm_head_is_the_embedding(name, tmp_path):
    change = lambda tensors: tensors.update({"lm_head.weight": np.array(embedding(tensors))})
    folder = copy_of(name, tmp_path / "src", tied=True, change=change)
    for one in both(folder, tmp_path):
        assert load_target(one, dtype="float32").lm_head is None


def test_a_file_of_more_than_one_block_is_compared_to_its_end(tmp_path):
    """Blocks of 1 MiB; the tensors have two and a half."""
    same = np.zeros((5, 1 << 19), np.uint8)
    other = same.copy()
    other[-1, -1] = 1
    write(tmp_path / "model.safetensors", {"a": same, "b": same.copy(), "c": other})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.same_bytes("a", "b")
    assert not checkpoint.same_bytes("a", "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"lm_head.weight": embedding(t)[:-1]}), r"lm_head.weight has shape"),
        (
            lambda t: t.update({"lm_head.weight": embedding(t).astype(ml_dtypes.float8_e4m3fn)}),
            "lm_head.weight is float8_e4m3fn; only the matrices",
        ),
    ],
)
def test_an_lm_head_that_cannot_be_used_is_refused_not_dropped(change, message, tmp_path, capsys):
    folder = copy_of("qwen3", tmp_path / "src", tied=True, change=change)
    with pytest.raises(CheckpointError, match=message):
        load_target(folder, dtype="float32")
    for command in (["plan", str(folder)], ["convert", str(folder), str(tmp_path / "dst")]):
        assert main(command) == 2
        assert "lm_head.weight" in capsys.readouterr().err
