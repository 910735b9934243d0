"""Heads in every layout load alike; heads that would draft garbage are refused with a reason."""

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.checkpoint import (
    CheckpointError,
    load_head,
    load_target,
    save_head,
    save_speculators_head,
    target_config,
)
from peagle_jax.method.draft_head import DraftHead
from tests.golden import layouts
from tests.golden.folders import GOLDEN, parts, written

HEADS = ("peagle-1", "peagle-4", "peagle-pruned", "peagle-norms", "peagle-qwen3")
HEADS += ("eagle3", "eagle31")
BLOCKS = ("dflash", "dflash2", "dspark")


@cache
def target():
    return target_config(GOLDEN / "qwen3")


def flat(config: dict, **changes) -> dict:
    """A speculators config.json in the flat form of AWS and SafeAILab."""
    layer = config["transformer_layer_config"]
    own = {k: v for k, v in config.items() if not k.startswith(("speculators", "transformer_"))}
    return layer | own | {"architectures": ["LlamaForCausalLMEagle3"]} | changes


def check_equal(head: DraftHead, other: DraftHead) -> None:
    assert head.config == other.config
    pairs = zip(jax.tree.leaves(head), jax.tree.leaves(other), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", [*HEADS, *BLOCKS])
def test_the_speculators_layout_states_the_depth_of_training(name):
    depth = {"peagle-1": 4, "peagle-4": 8, "peagle-pruned": 6, "eagle3": 3, "eagle31": 3}
    depth |= {"dflash": 4, "dflash2": 3, "dspark": 3}
    head = load_head(GOLDEN / name, target(), dtype="float32")
    assert head.config.trained_num_draft == depth.get(name, 5)


@pytest.mark.parametrize("name", [*HEADS, *BLOCKS])
def test_saving_a_head_and_loading_it_gives_it_back(name, tmp_path):
    head = load_head(GOLDEN / name, target(), dtype="float32")
    head.config = replace(head.config, logit_scale=0.5)
    save_head(head, tmp_path, max_position=512, dtype="float32")
    check_equal(load_head(tmp_path, target(), dtype="float32"), head)
    held = {key for key in parts(name)[1] if not key.startswith("confidence_head.")}
    assert held - {"d2t", "t2d"} == {
        key.replace("midlayer.", "layers.0.") for key in load_file(tmp_path / "model.safetensors")
    } - {"d2t", "t2d"}


@pytest.mark.parametrize("name", layouts.BLOCK_LAYOUTS)
def test_a_block_drafter_in_another_layout_is_the_same_head(name, tmp_path, caplog):
    layout = layouts.BLOCK_LAYOUTS[name]
    folder = written(tmp_path, *layout.convert(*parts(layout.source)))
    found = load_head(folder, target(), dtype="float32")
    check_equal(found, load_head(GOLDEN / layout.source, target(), dtype="float32"))
    assert found.config.taps == (2, 4, 5)
    assert not caplog.records, "no key of the released forms is unknown"


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_drafter_is_written_as_speculators_writes_it(name, tmp_path):
    head = load_head(GOLDEN / name, target(), dtype="float32")
    save_speculators_head(head, tmp_path, target(), dtype="float32")
    check_equal(load_head(tmp_path, target(), dtype="float32"), head)
    raw, golden = (json.loads((f / "config.json").read_text()) for f in (tmp_path, GOLDEN / name))
    for key in ("speculators_model_type", "architectures", "block_size", "sample_from_anchor"):
        assert raw[key] == golden[key]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"architectures": ["DFlareDraftModel"]}, "'DFlareDraftModel' is not supported"),
        ("dflash", {"dflash_config": {"use_swa": True}}, "use_swa"),
        ("dflash", {"block_size": None}, "states no block_size"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "give the head's taps by --taps"),
        ("dflash", {"mask_token_id": None}, "states no mask_token_id"),
        ("dflash2", {"selector_top_k": 8}, "selector_top_k 8 is not supported, 16 is"),
        ("dflash2", {"conv_group_size": 48}, "must divide"),
        ("dflash2", {"conv_kernel_size": 0}, "unused|without a place"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported"),
    ],
)
def test_block_drafters_that_cannot_run_are_refused(name, changes, message, tmp_path):
    config, tensors = parts(name)
    written(tmp_path, config | changes, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, target(), dtype="float32")


def test_an_eagle3_head_shares_what_it_does_not_own(tmp_path):
    """SafeAILab's heads hold no embedding; one with a full vocabulary may lack lm_head too."""
    config, tensors = parts("eagle3")
    del tensors["embed_tokens.weight"]
    head = load_head(written(tmp_path, config, tensors), target(), dtype="float32")
    assert head.embed is None
    assert head.lm_head is not None
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    written(tmp_path, config | {"draft_vocab_size": 256}, tensors)
    head = load_head(tmp_path, target(), dtype="float32")
    assert head.lm_head is None
    model = load_target(GOLDEN / "qwen3", dtype="float32")
    hidden = np.ones((1, 64), np.float32)
    logits = model.embed.unembed(head.norm(hidden))
    assert np.array_equal(head.logits(model, hidden), logits)


@pytest.mark.parametrize(
    ("name", "form"), [("peagle-1", dict), ("eagle3", dict), ("eagle3", flat), ("peagle-1", flat)]
)
def test_an_unstated_residual_norm_is_none_in_every_layout(name, form, tmp_path):
    """speculators' default is false for both methods; so is that of the flat layouts' models."""
    config, tensors = parts(name)
    config = {key: value for key, value in form(config).items() if key != "norm_before_residual"}
    head = load_head(written(tmp_path, config, tensors), target(), dtype="float32")
    assert head.config.norm_before_residual is False


@pytest.mark.parametrize("name", ["peagle-1", "peagle-qwen3"])
def test_a_nested_head_without_a_class_is_known_by_its_tensors(name, tmp_path):
    config, tensors = parts(name)
    config["transformer_layer_config"].pop("model_type")
    head = load_head(written(tmp_path, config, tensors), target(), dtype="float32")
    assert head.config == load_head(GOLDEN / name, target(), dtype="float32").config


def test_keys_of_a_head_that_change_nothing_are_named_once(tmp_path, caplog):
    config, tensors = layer_with(zebra=1)(*parts("peagle-1"))
    of_blocks = dict(input_embedding_scale=2.0, markov_rank=8, output_multiplier=3.0)
    folder = written(tmp_path, config | {"apple": 2} | of_blocks, tensors)
    load_head(folder, target(), dtype="float32")
    keys = ["apple", *of_blocks, "transformer_layer_config.zebra"]
    line = f"keys of config.json that change nothing: {', '.join(keys)}"
    assert [record.message for record in caplog.records] == [f"{folder}: {line}"]
    caplog.clear()
    for name in HEADS:
        load_head(GOLDEN / name, target(), dtype="float32")
    assert not caplog.records


def config_with(**changes):
    return lambda config, tensors: (config | changes, tensors)


def layer_with(**changes):
    return lambda config, tensors: (
        config | {"transformer_layer_config": config["transformer_layer_config"] | changes},
        tensors,
    )


def flat_with(**changes):
    return lambda config, tensors: (layouts.flat_llama(config, **changes), tensors)


def without(name: str):
    return lambda c, t: (c, {key: x for key, x in t.items() if key != name})


def with_tensor(name: str, make):
    return lambda c, t: (c, t | {name: make(t)})


def absolute_ids(t: dict) -> np.ndarray:
    return t["d2t"] + np.arange(len(t["d2t"]))


REFUSED = [
    ("peagle-1", config_with(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), r"taps \(2, 4, 9\)"),
    ("peagle-1", config_with(eagle_aux_hidden_state_layer_ids=[4, 2, 5]), "not 3 ascending"),
    ("peagle-1", config_with(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), "not 3 ascending"),
    ("peagle-1", config_with(eagle_aux_hidden_state_layer_ids=[2, 4]), "its fc takes 192, 2 taps"),
    ("peagle-1", config_with(num_aux_hidden_states=4), "its fc takes 192, 4 taps"),
    ("peagle-1", config_with(target_hidden_size=128), "states 128 wide"),
    ("peagle-1", layer_with(vocab_size=300), "vocabulary is 300"),
    ("peagle-1", config_with(mask_token_id=None), "names no mask token id"),
    ("peagle-1", config_with(mask_token_id=256), "256 lies outside"),
    ("peagle-1", without("mask_hidden"), "holds no mask_hidden"),
    ("peagle-1", with_tensor("mask_hidden", lambda t: t["mask_hidden"][..., :64]), "has shape"),
    ("peagle-1", without("fc.weight"), "not an EAGLE-3, P-EAGLE or DFlash head"),
    ("peagle-1", with_tensor("fc.weight", lambda t: t["mask_hidden"].ravel()), "two dim"),
    ("peagle-4", without("layers.2.mlp.up_proj.weight"), "up_proj.weight' is missing"),
    ("peagle-1", without("layers.0.hidden_norm.weight"), "is missing"),
    (
        "peagle-1",
        with_tensor("layers.1.norm.weight", lambda t: t["norm.weight"]),
        "without a place",
    ),
    (
        "peagle-1",
        with_tensor("layers.0.self_attn.o_proj.bias", lambda t: t["norm.weight"]),
        "without a place",
    ),
    ("peagle-1", with_tensor("norm.weight", lambda t: t["norm.weight"][:32]), "has shape"),
    ("peagle-norms", without("input_norm.weight"), "says norm_before_fc but"),
    ("peagle-1", config_with(fc_norm=True), "says fc_norm but"),
    ("peagle-pruned", without("d2t"), "96 of 256 tokens but there is no d2t"),
    ("peagle-pruned", with_tensor("d2t", absolute_ids), "absolute ids need"),
    (
        "peagle-pruned",
        lambda c, t: without("t2d")(c, t | {"d2t": absolute_ids(t)}),
        "ascending target ids below 256",
    ),
    (
        "peagle-pruned",
        lambda c, t: (c, t | {"d2t": np.arange(96), "t2d": np.arange(256) < 96}),
        "d2t and t2d name different",
    ),
    ("peagle-pruned", with_tensor("d2t", lambda t: t["d2t"][:90]), "has shape"),
    ("peagle-pruned", with_tensor("d2t", lambda t: t["d2t"][::-1]), "ascending"),
    ("peagle-pruned", with_tensor("d2t", lambda t: t["d2t"] - 200), "ascending"),
    ("peagle-1", with_tensor("d2t", lambda t: np.arange(256)[::-1].copy()), "ascending"),
    ("eagle3", without("lm_head.weight"), "no lm_head"),
    ("peagle-1", config_with(selector_kind="lattice"), "selector_kind 'lattice' is not supported"),
    (
        "eagle3",
        config_with(speculators_model_type="dflash"),
        "speculators_model_type 'dflash' is not supported, 'eagle3' or 'peagle' is",
    ),
    (
        "eagle3",
        lambda c, t: (
            c | {"speculators_config": c["speculators_config"] | {"algorithm": "mtp"}},
            t,
        ),
        "algorithm 'mtp' is not supported",
    ),
    (
        "peagle-1",
        config_with(speculators_model_type="eagle3"),
        "speculators_model_type is 'eagle3' but the file holds mask_hidden",
    ),
    (
        "eagle3",
        config_with(speculators_model_type="peagle"),
        "speculators_model_type is 'peagle' but the file holds no mask_hidden",
    ),
    ("eagle3", layer_with(model_type="gemma"), "model_type 'gemma' is not"),
    ("peagle-norms", config_with(norm_before_fc=False), "norm_before_fc false but the file holds"),
    ("peagle-1", layer_with(is_causal=False), "is_causal False"),
    ("peagle-1", layer_with(layer_types=["chunked_attention"]), "layer_types must name"),
    ("peagle-1", layer_with(logit_scale=0), "logit_scale"),
    (
        "peagle-pruned",
        with_tensor("t2d", lambda t: (t["t2d"] * np.uint8(3)).view(bool)),
        "t2d is bool but holds bytes other than 0 and 1",
    ),
    ("peagle-1", with_tensor("d2t", lambda t: np.zeros(256, np.float32)), "not whole numbers"),
    ("peagle-1", layer_with(hidden_act="gelu"), "'gelu'"),
    (
        "peagle-1",
        layer_with(
            rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4),
            max_position_embeddings=8,
        ),
        "rope_type dynamic in a head with fewer max_position",
    ),
    (
        "peagle-1",
        layer_with(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)),
        "'longrope'",
    ),
    (
        "eagle3",
        flat_with(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state false",
    ),
    ("eagle3", flat_with(target_hidden_size="64"), "target_hidden_size"),
    ("eagle3", flat_with(architectures="Llama"), "must be a list"),
    ("eagle3", flat_with(eagle_aux_hidden_state_layer_ids=["low"]), "must be a token id or a list"),
    ("eagle3", flat_with(layer_types=["sliding_attention"]), "states no sliding_window"),
    (
        "eagle3",
        flat_with(layer_types=["sliding_attention"] * 2, sliding_window=8),
        "for each of 1 layers",
    ),
    ("eagle3", flat_with(num_key_value_heads=3), "must be a multiple"),
    (
        "peagle-norms",
        lambda c, t: (
            c | {"fc_norm": True},
            t | {f"fc_norm.{i}.weight": np.ones(64, np.float32) for i in range(3)},
        ),
        "exclude each other",
    ),
    (
        "eagle3",
        lambda c, t: (c, t | {"norm.weight": np.ones(64, np.uint8)}),
        "norm.weight is uint8; only the matrices",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_head_that_does_not_fit_is_refused(name, change, message, tmp_path):
    folder = written(tmp_path / "head", *change(*parts(name)))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head(folder, target(), dtype="float32")
    assert str(folder) in str(caught.value)
