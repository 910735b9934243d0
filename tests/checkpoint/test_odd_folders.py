"""Folders of other programs, and hostile ones: they load, or one short line says why not."""

import json
import logging
import os

import pytest

from peagle_jax.checkpoint import CheckpointError, load_head, load_target
from peagle_jax.checkpoint.target_json import target_config
from peagle_jax.config import ConfigError
from peagle_jax.text.tokenizer import Tokenizer
from tests.checkpoint.test_quantized_files import CHANNEL, assert_same
from tests.golden.folders import GOLDEN, config, tensors, written


@pytest.mark.parametrize("name", ["qwen2", CHANNEL])
def test_a_model_that_automodel_saved_loads_where_its_embedding_is_tied(name, tmp_path):
    """Its tensors have no prefix and it has no lm_head."""
    raw, held = config(name), tensors(name)
    bare = {n.removeprefix("model."): x for n, x in held.items() if n != "lm_head.weight"}
    folder = written(tmp_path, raw, bare)
    if raw.get("tie_word_embeddings"):
        assert_same(folder, name)
        return
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        load_target(folder, dtype="float32")


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_pipe_in_place_of_weights_is_not_waited_for(name, tmp_path):
    written(tmp_path, config("qwen3"), tensors("qwen3"))
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        load_target(tmp_path, dtype="float32")


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4", "F6_E2M3"])
def test_a_dtype_of_the_format_that_no_model_has_is_named(dtype, tmp_path):
    written(tmp_path, config("qwen3"), tensors("qwen3"))
    header = json.dumps({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"tensor 'x' is {dtype}, which is not supported"):
        load_target(tmp_path, dtype="float32")


@pytest.mark.slow
def test_a_million_unknown_keys_are_a_short_line(tmp_path, caplog):
    raw = config("qwen3") | {f"key{i}": i for i in range(1_000_000)} | {"a" * 10**6: 1}
    written(tmp_path, raw, tensors("qwen3"))
    with caplog.at_level(logging.WARNING):
        load_target(tmp_path, dtype="float32")
    (line,) = [r.getMessage() for r in caplog.records if "change nothing" in r.getMessage()]
    assert line.endswith(" and 999,991 more")
    assert len(line) < 1000


@pytest.mark.parametrize("key", ["hidden_size", "model_type", "rope_scaling"])
def test_an_error_quotes_little_of_a_file(key, tmp_path):
    written(tmp_path, config("qwen3") | {key: "x" * 10**6}, tensors("qwen3"))
    with pytest.raises(CheckpointError) as caught:
        load_target(tmp_path, dtype="float32")
    assert len(str(caught.value)) < 5000


def test_taps_that_a_small_target_lacks_name_the_option(tmp_path):
    """(2, L/2, L-3) are no ascending ids for six layers and fewer."""
    raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text()) | {"num_hidden_layers": 4}
    raw.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = tmp_path / "head"
    head.mkdir()
    stated = config("peagle-1")
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        stated.pop(name, None)
    written(head, stated, tensors("peagle-1"))
    with pytest.raises(CheckpointError, match=r"names none, so give them by --taps"):
        load_head(head, target_config(tmp_path), dtype="float32")


@pytest.fixture
def tokenizer(tmp_path):
    """The folder of a tokenizer that knows one word, and no token for unknown ones."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    parts |= dict.fromkeys(("post_processor", "decoder")) | {"version": "1.0", "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts | {"model": model}))
    return tmp_path


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error_of_the_text(tokenizer):
    assert Tokenizer(tokenizer).encode("a") == [0]
    with pytest.raises(ConfigError, match=r"the tokenizer cannot encode the text: .*UNK"):
        Tokenizer(tokenizer).encode("b")


def test_a_nested_tokenizer_config_is_not_valid(tokenizer):
    (tokenizer / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer(tokenizer)
