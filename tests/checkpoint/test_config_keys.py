"""Keys of config.json: transformers' defaults, stray keys, and values that cannot be right."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from peagle_jax.checkpoint import CheckpointError, target_config
from peagle_jax.checkpoint.config_keys import IGNORED, KEYS, UNSUPPORTED
from peagle_jax.checkpoint.rope_json import DEFAULT_ROPE, GPT_OSS_ROPE, rope_parameters_json
from peagle_jax.checkpoint.tables import target_layout
from peagle_jax.checkpoint.target_json import target_unread_keys
from peagle_jax.rope_config import RopeConfig, YarnScaling
from tests.checkpoint import released
from tests.checkpoint.released import write_config

SLIDING, FULL = "sliding_attention", "full_attention"
NAMES = {
    "llama": "llama-3.1-8b",
    "mistral": "mistral-7b-v0.1",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-coder-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "gemma4_text": "gemma-4-31b",
}
"""A released config of each `model_type`."""


def config_of(kind: str) -> dict:
    config = json.loads(json.dumps(released.CONFIGS[NAMES[kind]][0]))
    return config.get("text_config", config)


def read(folder: Path, config: dict):
    return target_config(write_config(folder, config))


def unread(folder: Path) -> list[str]:
    return target_unread_keys(json.loads((folder / "config.json").read_text()))


def fields_of(kind: str) -> dict[str, dataclasses.Field]:
    """Fields of transformers' class that are no constants of the class."""
    return {field.name: field for field in dataclasses.fields(CONFIG_MAPPING[kind])}


def default_of(field: dataclasses.Field):
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


@pytest.mark.parametrize("kind", KEYS)
def test_the_tables_have_the_defaults_of_transformers(kind):
    theirs = fields_of(kind)
    renamed = CONFIG_MAPPING[kind].attribute_map
    for name, key in KEYS[kind].items():
        if name in theirs:
            default = default_of(theirs[name])
            if name == "mlp_only_layers":  # None there means no such layer
                default = default or []
            assert key.default == default, name
        elif renamed.get(name) in theirs:  # another name of a key that has a default
            assert key.default is None, name
        elif name == "global_head_dim":
            wide = CONFIG_MAPPING[kind]().per_layer_config
            assert wide[5].head_dim == key.default
        else:  # a key that transformers' class does not have: the neutral value, or nothing
            assert key.default in (None, key.accepted[0] if key.accepted else None), name


@pytest.mark.parametrize("kind", KEYS)
def test_no_key_of_transformers_is_unknown_here(kind):
    """A key that a later version adds must be read, refused or named as without effect."""
    unknown = fields_of(kind).keys() - KEYS[kind].keys() - UNSUPPORTED.keys() - IGNORED
    assert not unknown


@pytest.mark.parametrize("kind", KEYS)
def test_ropes_and_token_ids_have_the_defaults_of_transformers(kind, tmp_path):
    theirs = CONFIG_MAPPING[kind]()
    config = config_of(kind)
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id"):
        config.pop(key, None)
    ours = read(tmp_path, config)
    assert (ours.bos_id, ours.eos_ids[0] if ours.eos_ids else None) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
    )
    stated = theirs.rope_parameters
    if kind == "gemma4_text":
        assert stated == {
            SLIDING: rope_parameters_json(ours.rope),
            FULL: rope_parameters_json(ours.global_attention.rope),
        }
    else:
        assert rope_parameters_json(ours.rope) == stated
        assert ours.rope == (GPT_OSS_ROPE if kind == "gpt_oss" else DEFAULT_ROPE)


def outcome(folder: Path, config: dict):
    """The config, or the error's words without the folder."""
    try:
        return read(folder, config)
    except CheckpointError as error:
        return str(error).replace("is missing and its default ", "")


@pytest.mark.parametrize("kind", KEYS)
def test_a_missing_key_is_the_default_of_transformers(kind, tmp_path):
    fields = fields_of(kind)
    accepted = []
    for key in KEYS[kind]:
        config = config_of(kind)
        default = default_of(fields[key]) if key in fields else KEYS[kind][key].default
        config.pop(key, None)
        got = outcome(tmp_path, config)
        assert got == outcome(tmp_path, config | {key: default}), key
        accepted += [] if isinstance(got, str) else [key]
    assert len(accepted) >= len(KEYS[kind]) - 4, "most defaults fit a released config"


WRONG = [math.nan, math.inf, -math.inf, -1, -0.5, "x", {"a": 1}, [[]]]


@pytest.mark.parametrize("kind", KEYS)
def test_a_value_that_cannot_be_right_is_refused_by_its_key(kind, tmp_path):
    for key in KEYS[kind]:
        for value in WRONG:
            if (key, value) in (("per_layer_config", {"a": 1}), ("layer_types", [[]])):
                continue  # of the right kind; what is in them has tests of its own
            with pytest.raises(CheckpointError, match=key) as caught:
                read(tmp_path, config_of(kind) | {key: value})
            assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_key_of_another_family_is_refused_unless_it_is_neutral(key, tmp_path):
    value = not UNSUPPORTED[key].accepted[0] if "causal" in key or "bias" in key else 7
    with pytest.raises(CheckpointError, match=f"{key} .* is not supported"):
        read(tmp_path, config_of("llama") | {key: value})
    for neutral in UNSUPPORTED[key].accepted:
        read(tmp_path, config_of("llama") | {key: neutral})


LLAMA3 = released.LLAMA3_ROPE | dict(factor=8.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
BAD_VALUES = [
    (dict(rope_theta=0), "rope_theta must be a number greater than 1"),
    (dict(rope_theta=math.nan), "rope_theta must be a finite number"),
    (dict(rope_theta=1e39), "rope_theta must be a finite number"),
    (dict(rms_norm_eps=0), "rms_norm_eps must be a number greater than 0"),
    (dict(rms_norm_eps=1e-50), "rms_norm_eps 1e-50 is too small"),
    (dict(rms_norm_eps=10**400), "rms_norm_eps must be a finite number"),
    (dict(head_dim=127), "head_dim 127 is odd"),
    (dict(eos_token_id=128256), "eos_token_id 128256 lies outside the vocabulary of 128256"),
    (dict(bos_token_id=200000), "bos_token_id 200000 lies outside"),
    (dict(is_causal=False), "is_causal False is not supported, True is"),
    (dict(rope_scaling=LLAMA3 | dict(partial_rotary_factor=0.5)), "partial_rotary_factor 0.5"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (dict(rope_scaling=LLAMA3 | dict(factor=0.5)), "factor of rope scaling must be at least 1"),
    (dict(rope_scaling=LLAMA3 | dict(low_freq_factor=0)), "low_freq_factor must be a number gr"),
    (
        dict(rope_scaling=LLAMA3 | dict(high_freq_factor=1.0)),
        "high_freq_factor 1.0 must be greater",
    ),
    (dict(rope_scaling=LLAMA3 | dict(type="yarn")), "rope_type is 'llama3' and type 'yarn'"),
    (dict(rope_scaling=LLAMA3 | dict(rope_type=[1])), "rope_type must be a text"),
    (dict(rope_scaling=LLAMA3 | dict(rope_theta=1e4)), "rope_theta is 500000.0 beside .* 10000.0"),
    (dict(rope_scaling=YARN | dict(beta_slow=0)), "beta_slow must be a number greater than 0"),
    (
        dict(rope_scaling=YARN | dict(beta_fast=0.5)),
        "beta_fast 0.5 must not be less than beta_slow",
    ),
    (dict(rope_scaling=YARN | dict(attention_factor=0)), "attention_factor must be a number gr"),
    (dict(rope_scaling=YARN | dict(mscale=-2.0, mscale_all_dim=1.0)), "mscale must be a number gr"),
    (
        dict(rope_parameters=dict(rope_type="default")),
        "rope_scaling and rope_parameters contradict each other",
    ),
    (
        dict(rope_parameters=LLAMA3 | dict(factor=4.0)),
        "rope_scaling and rope_parameters contradict each other",
    ),
    (
        dict(original_max_position_embeddings=4096),
        "original_max_position_embeddings is 4096 beside .* 8192 among them",
    ),
    (dict(rope_scaling=dict(factor=8.0)), "state a factor, but no rope_type"),
    (dict(rope_scaling=LLAMA3 | dict(rope_type=None)), "state a factor, but no rope_type"),
    (dict(rope_scaling=False), "rope_scaling must be an object"),
    (dict(rope_parameters=[]), "rope_parameters must be an object"),
    (dict(layer_types=["chunked_attention"] * 32), "layer_types must name"),
    (dict(layer_types=[FULL] * 31), "layer_types must name .* for each of 32 layers"),
    (dict(rope_scaling={FULL: LLAMA3}), "a rope of its own for each type of layer"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_values_that_would_give_nonsense_are_refused(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, config_of("llama") | changes)
    assert str(tmp_path) in str(caught.value)


BAD_OF_A_FAMILY = [
    ("mistral", dict(layer_types=[SLIDING] * 3), "layer_types must name .* for each of"),
    ("qwen3_moe", dict(layer_types=["x"] * 48), "layer_types must name"),
    ("qwen3_moe", dict(num_experts_per_tok=129), "num_experts_per_tok 129 is more than the 128"),
    ("qwen3_moe", dict(num_local_experts=64), "num_experts and num_local_experts contradict"),
    ("qwen3_moe", dict(num_experts=10**9), "num_experts must be a whole number from 1 to"),
    ("gpt_oss", dict(experts_per_token=2), "experts_per_token and num_experts_per_tok contradict"),
    ("gpt_oss", dict(swiglu_limit=0), "swiglu_limit must be a number greater than 0"),
    ("gpt_oss", dict(sliding_window=None), "states no sliding_window"),
    ("gemma4_text", dict(final_logit_softcapping=0), "final_logit_softcapping must be a number gr"),
    ("gemma4_text", dict(global_head_dim=511), "head_dim 511 is odd"),
    ("gemma4_text", dict(rope_scaling=LLAMA3), "rope_scaling .* is not supported"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), BAD_OF_A_FAMILY)
def test_contradictions_of_a_family_are_refused(kind, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config_of(kind) | changes)


def test_a_config_of_absurd_size_is_refused_at_once(tmp_path):
    """Both numbers are allowed; together they name fifty million tensors."""
    config = read(tmp_path, config_of("qwen3_moe") | dict(num_hidden_layers=4096, num_experts=4096))
    with pytest.raises(
        CheckpointError, match=r"100,000 others\): config.json describes another model"
    ):
        target_layout(config, {})


def test_a_wrapper_and_its_text_config_must_agree(tmp_path):
    config = json.loads(json.dumps(released.GEMMA_4_31B))
    for changes in (dict(tie_word_embeddings=False), dict(is_causal=False)):
        with pytest.raises(CheckpointError, match=next(iter(changes))):
            read(tmp_path, config | changes)


def test_two_statements_that_agree_are_one(tmp_path):
    config = config_of("llama")
    plain = read(tmp_path, config)
    both = config | {"rope_parameters": LLAMA3 | {"rope_theta": 500000}}
    assert read(tmp_path, both) == plain
    assert read(tmp_path, config | {"original_max_position_embeddings": 8192}) == plain


def test_scaling_without_its_original_length_counts_from_the_longest(tmp_path):
    """As in transformers: `original_max_position_embeddings`, else the longest position."""
    yarn = dict(rope_type="yarn", factor=4.0)
    made = lambda length: RopeConfig(
        theta=1e6, scaling=YarnScaling(factor=4.0, original_max_position=length)
    )
    config = config_of("qwen3") | dict(rope_scaling=yarn)
    assert read(tmp_path, config).rope == made(40960)
    assert read(tmp_path, config | dict(original_max_position_embeddings=1024)).rope == made(1024)


def test_a_stated_null_of_token_ids_means_none(tmp_path):
    config = config_of("llama") | dict(eos_token_id=None, bos_token_id=None)
    got = read(tmp_path, config)
    assert (got.eos_ids, got.bos_id) == ((), None)


def test_stray_keys_change_nothing_and_are_listed(tmp_path):
    for kind in KEYS:
        config = config_of(kind)
        plain = read(tmp_path, config)
        assert unread(tmp_path) == []
        assert read(tmp_path, config | {"zebra": 1, "apple": [math.nan], "_private": 2}) == plain
        assert unread(tmp_path) == ["apple", "zebra"]
    scaled = config_of("llama")
    scaled["rope_scaling"] = scaled["rope_scaling"] | {"mrope_section": [1, 2]}
    assert read(tmp_path, scaled).rope.scaling.factor == 8.0
    assert unread(tmp_path) == ["rope_scaling.mrope_section"]
    wrapper = json.loads(json.dumps(released.GEMMA_4_31B)) | {"hidden_size": 5}
    wrapper["text_config"]["rope_parameters"][FULL]["factor_of_safety"] = 3
    assert read(tmp_path, wrapper).hidden_size == 5376
    assert unread(tmp_path) == [f"rope_parameters.{FULL}.factor_of_safety", "hidden_size"][::-1]


def test_a_duplicate_key_is_refused(tmp_path):
    text = json.dumps(config_of("llama"))
    (tmp_path / "config.json").write_text(text[:-1] + ', "rope_theta": 2.0}')
    with pytest.raises(CheckpointError, match="the key 'rope_theta' stands there twice"):
        target_config(tmp_path)
