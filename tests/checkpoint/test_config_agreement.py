"""Changed config.json files: if both this reader and transformers accept one, they read the same
model.
"""

import math
from collections import Counter
from random import Random

import pytest
from transformers import CONFIG_MAPPING

from peagle_jax.checkpoint import CheckpointError, target_config
from peagle_jax.checkpoint.config_keys import KEYS
from peagle_jax.checkpoint.rope_json import FULL, SLIDING, rope_parameters_json
from peagle_jax.config import TargetConfig
from tests.checkpoint.released import write_config
from tests.convert.damage import add_key, change_key, drop_key
from tests.convert.seeds import SEEDS, seed

TARGETS = [name for name, layers in SEEDS.items() if layers is not None]
CHANGES = [change_key, change_key, add_key, drop_key]


def ours(config: TargetConfig) -> dict:
    """The fields that decide the result, by transformers' names."""
    facts = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "windows": [config.window(i) for i in range(config.num_layers)],
        "rope": rope_parameters_json(config.rope),
    }
    if config.experts:
        facts["num_experts"] = config.experts.num_experts
        facts["num_experts_per_tok"] = config.experts.top_k
        facts["norm_topk_prob"] = config.experts.normalize
    if config.family == "gpt_oss":
        facts["swiglu_limit"] = config.swiglu_limit
    if config.family == "gemma4":
        facts["final_logit_softcapping"] = config.logit_softcap
        wide = rope_parameters_json(config.global_attention.rope)
        facts["rope"] = {SLIDING: facts["rope"], FULL: wide}
    else:
        facts["tie_word_embeddings"] = config.tie_embeddings
    return facts


def stated(value):
    """Without the nulls of an object."""
    if not isinstance(value, dict):
        return value
    return {key: stated(inner) for key, inner in value.items() if inner is not None}


def theirs(kind: str, raw: dict) -> dict | None:
    """The same of transformers' class; None if it refuses the keys. null is a missing key but where
    it is a value.
    """
    table = KEYS[kind]
    is_value = lambda key: key in table and (table[key].nullable or table[key].default is None)
    raw = {key: stated(value) for key, value in raw.items() if value is not None or is_value(key)}
    try:
        config = CONFIG_MAPPING[kind](**raw)
    except Exception:  # any: its checks raise errors of many kinds, and some are no checks
        return None
    layers, width = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None or kind in ("llama", "mistral", "qwen3_moe"):  # not read by these models
        types = [SLIDING if kind == "mistral" and width else FULL] * layers
    of_layers = ("head_dim", "num_key_value_heads") if kind == "gemma4_text" else ()
    keys = [key for key in table if key not in of_layers and hasattr(config, key)]
    facts = {key: getattr(config, key) for key in keys}
    facts |= {"windows": [width if one == SLIDING else None for one in types]}
    return facts | {"rope": config.rope_parameters}


YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def same_rope(mine: dict, other: dict) -> bool:
    if SLIDING in mine:
        return all(same_rope(mine[key], other[key]) for key in mine)
    other = YARN | {key: value for key, value in other.items() if value is not None}
    if mine["rope_type"] == "default" and other.get("rope_type") == "proportional":
        mine = mine | {"rope_type": "proportional"}  # of all frequencies
        if other.get("partial_rotary_factor", 1.0) != 1.0:
            return False
    if other.get("mscale") and other.get("mscale_all_dim"):
        mine = {key: value for key, value in mine.items() if key != "attention_factor"}
    return all(
        math.isclose(value, other.get(key) or 0)
        if isinstance(value, float)
        else value == other.get(key)
        for key, value in mine.items()
    )


@pytest.mark.parametrize("name", TARGETS)
def test_a_config_that_both_accept_means_the_same(name, num_cases, tmp_path):
    verdicts = Counter()
    for number in range(num_cases("damaged configs", 120)):
        rng, folder = Random(number), seed(name).copy()
        done = [rng.choice(CHANGES)(folder, rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        write_config(tmp_path, folder.config)
        try:
            mine = ours(target_config(tmp_path))
        except CheckpointError:
            verdicts["refused"] += 1
            continue
        raw = folder.config.get("text_config") or folder.config
        other = theirs(raw.get("model_type") or "gemma4_text", raw)
        if other is None:
            verdicts["refused by transformers"] += 1
            continue
        verdicts["accepted"] += 1
        for key in mine.keys() & other.keys():
            equal = same_rope(mine[key], other[key]) if key == "rope" else mine[key] == other[key]
            assert equal, f"case {number}: {done}: {key} is {mine[key]!r}, not {other[key]!r}"
    if verdicts.total() >= 120:
        assert min(verdicts["refused"], verdicts["accepted"]) > 10, verdicts
