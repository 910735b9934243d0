"""The golden heads as other trainers save them: the same logits; and how their tap ids are read."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_head,
    load_target,
    save_head,
    save_speculators_head,
)
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.presets import PRESETS
from tests.checkpoint import released
from tests.golden import layouts
from tests.golden.folders import GOLDEN, parts, written
from tests.tiny import causal_attention

ATOL = 5e-4  # logits reach 20


@cache
def target():
    return load_target(GOLDEN / "qwen3", dtype="float32")


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "expected" / f"{name}.safetensors")


def load(folder: Path, **kwargs) -> DraftHead:
    return load_head(folder, target().config, dtype="float32", **kwargs)


def run(head: DraftHead, tokens, hidden) -> np.ndarray:
    """Logits of one pass over rows [B, T] at positions 0, 1, ..."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = [None] * head.config.num_layers
    out, _ = head(target(), jnp.asarray(tokens), hidden, positions, cache, causal_attention)
    return np.asarray(head.logits(target(), out))


def peagle_logits(head: DraftHead, source: str) -> np.ndarray:
    """[3, K, Vd] of the golden rounds."""
    want, seen = expected(source), load_file(GOLDEN / "expected" / "sequence.safetensors")
    K, anchor = want["chain_logits"].shape[1], want["chain_anchor"][:, None]
    rows = np.arange(28)
    is_real = rows <= anchor
    tokens = np.where(is_real, seen["tokens"][rows + 1], head.config.mask_token_id)
    states = np.where(is_real[..., None], seen["taps"][rows], head.mask_hidden[...])
    logits = run(head, tokens, head.fuse(jnp.asarray(states)))
    return logits[np.arange(3)[:, None], anchor + np.arange(K)]


def eagle_logits(head: DraftHead) -> np.ndarray:
    """[n, Vd] of the first step over the golden sequence."""
    seen = load_file(GOLDEN / "expected" / "sequence.safetensors")
    hidden = head.fuse(jnp.asarray(seen["taps"][None, :-1]))
    return run(head, seen["tokens"][None, 1:], hidden)[0]


def check_logits(head: DraftHead, source: str) -> None:
    if source.startswith("eagle"):
        np.testing.assert_allclose(eagle_logits(head), expected(source)["ttt_logits"][0], atol=ATOL)
    else:
        want = expected(source)["chain_logits"]
        np.testing.assert_allclose(peagle_logits(head, source), want, atol=ATOL)


@pytest.mark.sampled(3, slow=1)
@pytest.mark.parametrize("name", ["peagle-4", "peagle-bias", "peagle-shared", "eagle3", "eagle31"])
def test_golden_heads_have_the_golden_logits(name):
    check_logits(load(GOLDEN / name), name)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_head_in_another_layout_has_the_same_logits(name, tmp_path):
    layout = layouts.LAYOUTS[name]
    head = load(written(tmp_path, *layout.convert(*parts(layout.source))))
    assert (head.config.taps or target().config.default_taps) == (2, 4, 5)
    check_logits(head, layout.source)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_head_of_any_layout_is_written_as_aws_writes_it(name, tmp_path):
    layout = layouts.LAYOUTS[name]
    head = load(written(tmp_path / "in", *layout.convert(*parts(layout.source))))
    save_head(head, tmp_path / "out", max_position=512, dtype="float32")
    again = load(tmp_path / "out")
    assert again.config == head.config
    check_logits(again, layout.source)
    saved = Checkpoint(tmp_path / "out")
    assert saved.info("d2t").dtype == np.int64
    assert saved.info("t2d").dtype == bool
    assert not any(n.startswith(("layers.0.", "model.")) for n in saved.names())
    if "mask_hidden" in saved:
        assert saved.info("mask_hidden").shape == (1, 1, 192)


@pytest.mark.parametrize("name", ["peagle-4", "eagle31", "peagle-qwen3"])
def test_a_head_is_written_as_speculators_writes_it(name, tmp_path):
    head = load(GOLDEN / name)
    save_speculators_head(head, tmp_path, target().config, dtype="float32")
    taps = head.config.taps or target().config.default_taps
    depth = head.config.trained_num_draft or 7
    again = load(tmp_path)
    assert again.config == replace(head.config, taps=taps, trained_num_draft=depth)
    check_logits(again, name)
    ours, theirs = Checkpoint(tmp_path), Checkpoint(GOLDEN / name)
    assert set(theirs.names()) <= set(ours.names())
    assert {n: ours.info(n).shape for n in theirs.names()} == {
        n: theirs.info(n).shape for n in theirs.names()
    }
    raw, golden = (json.loads((f / "config.json").read_text()) for f in (tmp_path, GOLDEN / name))
    for key in ("speculators_model_type", "draft_vocab_size", "architectures", "mask_token_id"):
        assert raw.get(key) == golden.get(key)


def test_a_config_that_says_nothing_of_biases_leaves_it_to_the_tensors(tmp_path):
    config, tensors = parts("peagle-bias")
    flat = layouts.flat_llama(config, "attention_bias", fc_norm=True, mask_token_id=255)
    check_logits(load(written(tmp_path, flat, tensors)), "peagle-bias")
    no_output = {n: x for n, x in tensors.items() if not n.endswith("o_proj.bias")}
    head = load(written(tmp_path, flat, no_output))
    assert head.first.attention.qkv.bias is not None
    assert head.first.attention.out.bias is None
    some = {n: x for n, x in tensors.items() if not n.endswith("1.self_attn.q_proj.bias")}
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.bias' is missing"):
        load(written(tmp_path, flat, some))


def test_qwen_heads_are_known_by_their_architecture_or_by_the_inner_model_type(tmp_path):
    config, tensors = parts("peagle-qwen3")
    assert load(GOLDEN / "peagle-qwen3").config.qk_norm
    inner = config["transformer_layer_config"]
    slides = dict(sliding_window=inner["sliding_window"], layer_types=inner["layer_types"])
    flat = lambda **changes: layouts.flat_llama(config, mask_token_id=255, **slides, **changes)
    for architecture in ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"):
        head = load(written(tmp_path, flat(architectures=[architecture]), tensors))
        assert head.config.sliding_windows == (None, 6)
        check_logits(head, "peagle-qwen3")
    # The class decides, not the target's model_type: this one has no q and k norms.
    llama = flat(architectures=["LlamaForCausalLMEagle3"], model_type="qwen3")
    with pytest.raises(CheckpointError, match=r"without a place in the head: .*k_norm"):
        load(written(tmp_path, llama, tensors))


@pytest.mark.parametrize("name", ["qwen3-coder-30b-a3b", "qwen3-8b", "llama-3.1-8b"])
def test_a_flat_head_may_have_the_keys_of_its_target(name, tmp_path):
    """NeMo AutoModel changes the sizes in the target's config.json and keeps its other keys."""
    config, tensors = parts("eagle3")
    sizes = config["transformer_layer_config"]
    sizes = {
        key: sizes[key]
        for key in released.CONFIGS[name][0]
        if "size" in key or "num_" in key
        if key in sizes
    }
    own = dict(draft_vocab_size=96, head_dim=16, architectures=["LlamaEagle3"])
    head = load(written(tmp_path, released.CONFIGS[name][0] | sizes | own, tensors))
    assert head.config.rope == PRESETS[name].rope
    assert not head.config.qk_norm


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({IDS: [2, 4, 5]}, (2, 4, 5)),
        ({IDS: [1, 3, 4]}, (1, 3, 4)),  # vLLM reads them as they are
        ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {IDS: [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_config": {IDS: [3, 4, 7]}}, (3, 4, 7)),
        ({IDS: [2, 4, 5], "eagle_config": {IDS: [1, 2, 3]}}, (2, 4, 5)),
        ({IDS: [1, 3, 4], "architectures": ["PEagleDraftModel"]}, (2, 4, 5)),
        ({IDS: [2, 4, 5], "architectures": ["PEagleDraftModel"]}, (2, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({}, None),
    ],
)
def test_tap_ids_count_as_their_origin_counts(changes, taps, tmp_path):
    config, tensors = parts("eagle3")
    flat = layouts.flat_llama(config, **changes)
    folder = written(tmp_path, flat, tensors)
    assert load(folder).config.taps == taps
    assert load(folder, taps=[1, 5, 7]).config.taps == (1, 5, 7)


def test_nested_tap_ids_are_ids_of_entered_layers(tmp_path):
    config, tensors = parts("peagle-1")
    nested = config | {IDS: [1, 3, 4]}
    assert nested["architectures"] == ["PEagleDraftModel"]
    assert load(written(tmp_path, nested, tensors)).config.taps == (1, 3, 4)
