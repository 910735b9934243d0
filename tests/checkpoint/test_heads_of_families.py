"""P-EAGLE and EAGLE-3 heads on Mistral and Qwen2: saved, loaded for their target, and lossless."""

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from peagle_jax.checkpoint import CheckpointError, load_head, load_target, save_head
from peagle_jax.config import EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.rope_config import DynamicScaling, LinearScaling, RopeConfig
from peagle_jax.sampling_params import SamplingParams
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("mistral", "qwen2")
HEAD = dict(
    vocab_size=256,
    draft_vocab_size=96,
    taps=(2, 4, 5),
    attention_bias=True,
    mlp_bias=True,
    rope=RopeConfig(theta=1e4, scaling=LinearScaling(factor=2.0)),
)


@cache
def target(name: str):
    return load_target(GOLDEN / name, dtype="float32")


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_head_of_these_targets_is_loaded_and_drafts_losslessly(name, method, tmp_path):
    head = tiny.head(method, **HEAD | (dict(mask_token_id=None) if method == "eagle3" else {}))
    head.d2t.set_value(np.arange(96, dtype=np.int32))
    save_head(head, tmp_path, max_position=target(name).config.max_position, dtype="float32")
    again = load_head(tmp_path, target(name).config, dtype="float32")
    assert again.config == head.config
    pairs = zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    config = EngineConfig(
        num_draft=3,
        max_num_seqs=2,
        max_model_len=72,
        page_size=8,
        prefill_chunk=32,
        prefill_rows=2,
    )
    want = load_file(GOLDEN / "expected" / f"{name}.safetensors")
    done = one_bucket(Engine(target(name), again, config)).generate(
        want["tokens"].tolist(), SamplingParams(max_tokens=24)
    )
    assert [completion.tokens for completion in done] == want["greedy"].tolist()


FLAT = {
    "mistral": dict(model_type="mistral", sliding_window=4096),
    "qwen2": dict(
        model_type="qwen2", use_sliding_window=False, sliding_window=131072, max_window_layers=28
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_config_may_be_that_of_the_target(name, tmp_path):
    """NeMo Automodel copies it: the tensors say which biases the head has."""
    head = tiny.head(**HEAD | dict(mlp_bias=False))
    save_head(head, tmp_path, max_position=512, dtype="float32")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("architectures", "attention_bias", "mlp_bias")}
    (tmp_path / "config.json").write_text(json.dumps(raw | FLAT[name]))
    assert load_head(tmp_path, target(name).config, dtype="float32").config == head.config


def test_biases_of_a_heads_mlp_change_its_drafts():
    """Zero or not: what the config states is used."""
    with_bias, hidden = tiny.head(**HEAD), np.ones((1, 1, 32), np.float32)
    before = with_bias.first.mlp(hidden).added_to(hidden)
    bias = with_bias.first.mlp.gate_up.bias
    bias.set_value(bias[...] + 1)
    after = with_bias.first.mlp(hidden).added_to(hidden)
    assert np.abs(after - before).max() > 1e-2


def test_a_head_with_dynamic_rope_must_reach_as_far_as_its_target(tmp_path):
    rope = RopeConfig(theta=1e4, scaling=DynamicScaling(factor=2.0))
    head, config = tiny.head(**HEAD | dict(rope=rope)), target("mistral").config
    save_head(head, tmp_path, max_position=config.max_position, dtype="float32")
    assert load_head(tmp_path, config, dtype="float32").config.rope == rope
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["max_position_embeddings"] = config.max_position - 1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match="rope_type dynamic in a head with fewer max_position"
    ):
        load_head(tmp_path, config, dtype="float32")
