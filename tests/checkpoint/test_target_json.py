"""config.json <-> TargetConfig: the released files, every form of a key, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from peagle_jax.checkpoint import CheckpointError, target_config
from peagle_jax.checkpoint.target_writer import target_json
from peagle_jax.config import GlobalAttention
from peagle_jax.presets import PRESETS
from peagle_jax.rope_config import DynamicScaling, LinearScaling, RopeConfig, YarnScaling
from tests.checkpoint import released
from tests.checkpoint.released import write_config

GOLDEN = Path(__file__).parents[1] / "golden"
SLIDING, FULL = "sliding_attention", "full_attention"


def is_qwen(name: str) -> bool:
    return name.startswith("qwen")


@pytest.mark.parametrize("name", PRESETS)
def test_a_released_config_is_its_preset(name, tmp_path):
    config = target_config(write_config(tmp_path, *released.CONFIGS[name]))
    if is_qwen(name):  # files state a token that no Qwen prompt begins with
        config = replace(config, bos_id=None)
    assert config == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_what_is_written_as_the_same_model(name):
    """Its own class accepts the keys, and agrees on those that decide the forward pass."""
    from transformers import AutoConfig

    raw = target_json(PRESETS[name], "bfloat16")
    theirs = AutoConfig.for_model(**raw)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert getattr(theirs, key) == raw[key]
    if "layer_types" in raw:
        assert theirs.layer_types == raw["layer_types"]
        assert theirs.sliding_window == raw["sliding_window"]
    if PRESETS[name].family == "gemma4":
        wide = theirs.per_layer_config[5]
        assert (wide.head_dim, wide.num_key_value_heads) == (512, 4)
        assert theirs.rope_parameters[FULL]["rope_type"] == "proportional"


def read(folder: Path, name: str, generation: dict | None = None, **changes):
    config, own_generation = released.CONFIGS[name]
    generation = own_generation if generation is None else generation
    return target_config(write_config(folder, config | changes, generation))


def test_both_forms_of_rope_mean_the_same(tmp_path):
    for name in ("gpt-oss-20b", "llama-3.1-8b", "qwen3-8b"):
        config, _ = released.CONFIGS[name]
        scaling = config["rope_scaling"] or dict(rope_type="default")
        rope = dict(rope_theta=config["rope_theta"], **scaling)
        read_ = read(tmp_path, name, rope_scaling=None, rope_theta=None, rope_parameters=rope)
        assert read_.rope == PRESETS[name].rope
    assert read(tmp_path, "qwen3-8b", rope_scaling=dict(type="default")).rope.scaling is None


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(
    ("stated", "changes"),
    [
        ({}, {}),
        ({"truncate": False}, {"truncate": False}),
        ({"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"attention_factor": 1.25}, {"attention_factor": 1.25}),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, {"attention_factor": 1.0}),
        ({"mscale": 1.0}, {}),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, {}),
    ],
)
def test_yarn_with_all_that_a_file_may_state(stated, changes, tmp_path):
    """Qwen3 with the long context that users add by hand."""
    config = read(tmp_path, "qwen3-8b", rope_scaling=YARN | stated)
    scaling = YarnScaling(factor=4.0, original_max_position=32768)
    assert config.rope == RopeConfig(theta=1e6, scaling=replace(scaling, **changes))
    again = target_config(write_config(tmp_path, target_json(config, "bfloat16")))
    assert again.rope == config.rope


def test_windows_of_qwen_by_its_own_rule_and_by_layer_types(tmp_path):
    slides = dict(use_sliding_window=True, sliding_window=4096)
    config = read(tmp_path, "qwen3-8b", **slides, max_window_layers=30)
    assert config.sliding_windows == (None,) * 30 + (4096,) * 6
    types = [SLIDING, FULL] * 18
    assert (
        read(tmp_path, "qwen3-8b", **slides, layer_types=types).sliding_windows == (4096, None) * 18
    )
    again = target_config(write_config(tmp_path, target_json(config, "bfloat16")))
    assert again.sliding_windows == config.sliding_windows
    # A width that is switched off, as most files have it.
    assert read(tmp_path, "qwen3-8b", sliding_window=4096).sliding_windows is None


def test_a_mistral_slides_unless_its_config_says_null(tmp_path):
    """transformers' default is a window of 4096, and all layers have the same."""
    raw, generation = released.CONFIGS["mistral-7b-v0.1"]
    silent = {key: value for key, value in raw.items() if key != "sliding_window"}
    for config, windows in (
        (silent, (4096,) * 32),
        (silent | dict(sliding_window=100), (100,) * 32),
        (silent | dict(sliding_window=None), None),
        (silent | dict(sliding_window=None, layer_types=[FULL] * 32), None),
    ):
        found = target_config(write_config(tmp_path, config, generation))
        assert found.sliding_windows == windows
        again = target_config(write_config(tmp_path, target_json(found, "bfloat16")))
        assert again == found


@pytest.mark.parametrize(
    ("kind", "scaling"), [("linear", LinearScaling), ("dynamic", DynamicScaling)]
)
def test_ropes_that_only_have_a_factor(kind, scaling, tmp_path):
    for stated in (dict(rope_type=kind, factor=2), dict(type=kind, factor=2.0)):
        config = read(tmp_path, "llama-3.1-8b", rope_scaling=stated)
        assert config.rope == RopeConfig(theta=5e5, scaling=scaling(factor=2.0))
        assert config.has_dynamic_rope == (kind == "dynamic")
        again = target_config(write_config(tmp_path, target_json(config, "bfloat16")))
        assert again.rope == config.rope


@pytest.mark.parametrize(
    ("stated", "dense"),
    [
        (dict(mlp_only_layers=[0, 3, 99]), (0, 3)),
        (dict(decoder_sparse_step=2), tuple(range(0, 48, 2))),
        (
            dict(decoder_sparse_step=3, mlp_only_layers=[2]),
            (0, 1, 2, *(i for i in range(3, 48) if i % 3 != 2)),
        ),
        (dict(decoder_sparse_step=100), tuple(range(48))),
    ],
)
def test_dense_layers_of_qwen3_moe(stated, dense, tmp_path):
    config = read(tmp_path, "qwen3-coder-30b-a3b", **stated)
    assert config.experts.dense_layers == dense
    assert config.experts.dense_size == 5472
    assert config.intermediate_size == 768
    assert [config.is_sparse(i) for i in range(48)] == [i not in dense for i in range(48)]
    assert {config.mlp_size(i) for i in dense} == {5472}
    assert target_config(write_config(tmp_path, target_json(config, "bfloat16"))) == config


def test_gpt_oss_slides_in_every_other_layer_unless_it_says_else(tmp_path):
    silent = read(tmp_path, "gpt-oss-20b", layer_types=None, swiglu_limit=None)
    assert silent == PRESETS["gpt-oss-20b"]
    full = read(tmp_path, "gpt-oss-20b", layer_types=[FULL] * 24)
    assert full.sliding_windows is None


def gemma(**changes) -> dict:
    """The text config of Gemma 4 31B alone."""
    return released.GEMMA_4_31B["text_config"] | changes


def per_layer(**override) -> dict:
    """The form that transformers 5 saves."""
    layers = {str(i): dict(override) for i in range(5, 60, 6)}
    return gemma(global_head_dim=None, num_global_key_value_heads=None, per_layer_config=layers)


def test_gemma_in_its_three_forms(tmp_path):
    generation = released.CONFIGS["gemma-4-31b"][1]
    for config in (gemma(), per_layer(head_dim=512, num_key_value_heads=4)):
        assert target_config(write_config(tmp_path, config, generation)) == PRESETS["gemma-4-31b"]
    assert target_config(GOLDEN / "gemma4") == target_config(GOLDEN / "gemma4-text")


def test_gemma_may_have_values_of_their_own_in_full_layers(tmp_path):
    own = target_config(write_config(tmp_path, gemma(attention_k_eq_v=False)))
    preset = PRESETS["gemma-4-31b"].global_attention
    # transformers counts num_global_key_value_heads only where V is K.
    assert own.global_attention == replace(preset, shared_kv=False, num_kv_heads=16)
    heads = target_config(write_config(tmp_path, gemma(num_global_key_value_heads=None)))
    assert heads.global_attention.num_kv_heads == 16
    width = target_config(write_config(tmp_path, per_layer(num_key_value_heads=4)))
    assert width.global_attention == GlobalAttention(
        num_kv_heads=4, head_dim=256, rope=preset.rope, shared_kv=True
    )


@pytest.mark.parametrize(
    ("generation", "eos", "bos"),
    [
        (dict(eos_token_id=[7, 8], bos_token_id=9), (7, 8), 9),
        (dict(eos_token_id=7), (7,), 128000),
        (dict(do_sample=True), tuple(released.LLAMA3_EOS), 128000),
    ],
)
def test_ids_of_the_generation_config_come_first(generation, eos, bos, tmp_path):
    config = read(tmp_path, "llama-3.1-8b", generation)
    assert (config.eos_ids, config.bos_id) == (eos, bos)


def test_a_wrapper_may_leave_its_ids_to_the_text_config(tmp_path):
    config = read(tmp_path, "gemma-4-31b", {}, eos_token_id=None)
    assert (config.eos_ids, config.bos_id) == ((1,), 2)
    assert read(tmp_path, "gemma-4-31b", {}).eos_ids == (1, 106)


def quantized(**fields) -> dict:
    return dict(quantization_config=fields)


REFUSED = {
    "llama-3.1-8b": [
        (
            dict(model_type="phi3"),
            "model_type 'phi3' is not supported; gemma4, llama, mistral, qwen2",
        ),
        (dict(model_type=None), "model_type None is not supported"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported, 'silu' is"),
        (dict(use_sliding_window=True), "use_sliding_window True is not supported, False is"),
        (dict(layer_types=[SLIDING] * 32), "layer_types names sliding_attention"),
        (dict(num_key_value_heads=3), "must be a multiple of"),
        (dict(rope_scaling=dict(rope_type="linear")), "states no factor"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0, alpha=9.0)), "alpha 9.0 is not"),
        (
            dict(rope_scaling=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
            "partial_rotary_factor 0.5 is not supported",
        ),
        (dict(rope_scaling=dict(rope_type="longrope")), "rope_type 'longrope' is not supported"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "states no low_freq_factor"),
        (quantized(quant_method="awq", bits=4), "quant_method 'awq' is not supported; mxfp4, fp8"),
        (
            quantized(quant_method="fp8", weight_block_size=[64, 64]),
            r"weight_block_size \[64, 64\] is not supported, \[128, 128\] is",
        ),
        (quantized(quant_method="fp8", fmt="e5m2"), "fmt 'e5m2' is not supported"),
    ],
    "qwen3-8b": [
        (dict(rope_scaling=YARN | dict(factor=None)), "states no factor"),
        (dict(layer_types=[SLIDING] * 36), "use_sliding_window and sliding_window do not"),
        (dict(layer_types=["linear_attention"] * 36), "layer_types must name"),
    ],
    "qwen3-coder-30b-a3b": [
        (
            dict(mlp_only_layers=["0"]),
            r"mlp_only_layers must be a list of layer numbers, not \['0'\]",
        ),
        (dict(use_sliding_window=True), "use_sliding_window True"),
    ],
    "mistral-7b-v0.1": [
        (dict(layer_types=[SLIDING, FULL] * 16), "layer_types and sliding_window contradict"),
        (dict(layer_types=[SLIDING] * 32, sliding_window=None), "and sliding_window contradict"),
    ],
    "qwen2.5-7b": [
        (dict(layer_types=[SLIDING] * 28), "use_sliding_window and sliding_window do not"),
    ],
    "gpt-oss-20b": [
        (dict(swiglu_alpha=1.5), "swiglu_alpha 1.5 is not supported, 1.702 is"),
    ],
}
REFUSED_GEMMA = [
    (dict(num_kv_shared_layers=20), "num_kv_shared_layers 20 is not supported, 0 is"),
    (dict(hidden_size_per_layer_input=256), "hidden_size_per_layer_input 256 is not supported"),
    (dict(enable_moe_block=True), "enable_moe_block True is not supported"),
    (dict(use_bidirectional_attention="all"), "use_bidirectional_attention 'all'"),
    (dict(hidden_activation="silu"), "hidden_activation 'silu' is not supported"),
    (dict(layer_types=[SLIDING] * 60), "layer_types must end in full_attention"),
    (dict(rope_parameters={SLIDING: dict(rope_theta=1e4)}), "states no full_attention"),
    (dict(per_layer_config={"0": {"head_dim": 512}}), r"per_layer_config changes layers \['0'\]"),
    (dict(per_layer_config={"5": {"head_dim": 512}}), "must be the same for all full layers"),
    (dict(model_type="gemma3_text"), "model_type 'gemma3_text' is not supported"),
]
ALL_REFUSED = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "changes", "message"), ALL_REFUSED)
def test_what_is_not_done_or_not_stated_is_refused_by_its_key(name, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, name, **changes)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), REFUSED_GEMMA)
def test_a_gemma_that_is_not_done_is_refused_by_its_key(changes, message, tmp_path):
    wrapper = released.GEMMA_4_31B | dict(text_config=gemma(**changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        target_config(write_config(tmp_path, wrapper))
    assert str(tmp_path) in str(caught.value)


def test_gemma_without_its_text_config_is_refused(tmp_path):
    wrapper = released.GEMMA_4_31B | dict(text_config=None)
    with pytest.raises(CheckpointError, match="states no text_config"):
        target_config(write_config(tmp_path, wrapper))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id|model_type None"),
        ('{"eos_token_id": [1, -2]}', "eos_token_id must be a token id|model_type None"),
    ],
)
def test_broken_json_is_refused_and_names_its_file(file, text, message, tmp_path):
    write_config(tmp_path, *released.CONFIGS["llama-3.1-8b"])
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        target_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
