"""Llama and Qwen3 targets against transformers: logits, taps and greedy text of the
golden folders.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peagle_jax.checkpoint import CheckpointError, load_target, save_target
from peagle_jax.config import EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.models import Decoder
from peagle_jax.models.layers import apply_rope
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.sampling_params import SamplingParams
from tests.programs import one_bucket
from tests.tiny import attention_of_heads, causal_attention

pytestmark = pytest.mark.usefixtures("programs_without_controls")

GOLDEN = Path(__file__).parents[1] / "golden"
TAPS = (2, 4, 5)
LOGITS_ATOL = 2e-4  # logits reach 10: a few float32 steps summed over eight layers
STATES_ATOL = 5e-4  # residual streams reach 30


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "expected" / f"{family}.safetensors")


def forward(model: Decoder, tokens, taps=TAPS):
    """Logits, taps and last stream. Not jitted: the operations compile once for all variants."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    last, tapped, _ = model(tokens, positions, [None] * 8, causal_attention, taps=taps)
    return model.unembed(last), tapped, last


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_taps_equal_those_of_transformers(family):
    want = expected(family)
    model = load_target(GOLDEN / family, dtype="float32")
    assert model.config.default_taps == TAPS
    logits, taps, last = forward(model, want["tokens"])
    np.testing.assert_allclose(logits, want["logits"], atol=LOGITS_ATOL)
    np.testing.assert_allclose(taps, want["taps"].reshape(2, 41, -1), atol=STATES_ATOL)
    np.testing.assert_allclose(last, want["last"], atol=STATES_ATOL)


def _rope(**changes):
    def apply(model: Decoder):
        model.config = replace(model.config, rope=replace(model.config.rope, **changes))

    return apply


def _scaling(**changes):
    """Another llama3 scaling, of the same theta."""

    def apply(model: Decoder):
        rope = model.config.rope
        scaling = replace(rope.scaling, **changes)
        model.config = replace(model.config, rope=replace(rope, scaling=scaling))

    return apply


def _flat_norm(find):
    """One norm's weight reset to one, as if it had not been loaded."""

    def apply(model: Decoder):
        weight = find(model).weight
        weight.set_value(jnp.ones_like(weight[...]))

    return apply


def _without(name: str):
    def apply(model: Decoder):
        for layer in model.layers:
            setattr(layer.attention, name, lambda x: x)

    return apply


def _swapped(find, first: slice, second: slice):
    """Two equal blocks of rows of a fused weight in the other order."""

    def apply(model: Decoder):
        weight = find(model).weight
        rows = np.array(weight[...])
        rows[first], rows[second] = rows[second].copy(), rows[first].copy()
        weight.set_value(jnp.asarray(rows))

    return apply


BROKEN = {
    "no llama3 scaling": ("llama", _rope(scaling=None)),
    "other scaling factor": ("llama", _scaling(factor=7.0)),
    "other low frequency": ("llama", _scaling(low_freq_factor=2.0)),
    "other high frequency": ("llama", _scaling(high_freq_factor=3.0)),
    "other original length": ("llama", _scaling(original_max_position=128)),
    "other theta": ("qwen3", _rope(theta=5e5)),
    "no q norm": ("qwen3", _without("q_norm")),
    "no k norm": ("qwen3", _without("k_norm")),
    "no final norm": ("llama", _flat_norm(lambda m: m.norm)),
    "no input norm": ("qwen3", _flat_norm(lambda m: m.layers[7].input_norm)),
    "no post norm": ("llama", _flat_norm(lambda m: m.layers[0].post_norm)),
    "k for v": (
        "llama",
        _swapped(lambda m: m.layers[3].attention.qkv, slice(64, 96), slice(96, 128)),
    ),
    "up for gate": ("qwen3", _swapped(lambda m: m.layers[3].mlp.gate_up, slice(48), slice(48, 96))),
    "kv heads exchanged": (
        "llama",
        _swapped(lambda m: m.layers[3].attention.qkv, slice(64, 80), slice(80, 96)),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_shows_in_the_logits(rule):
    family, break_it = BROKEN[rule]
    model = load_target(GOLDEN / family, dtype="float32")
    break_it(model)
    logits, _, _ = forward(model, expected(family)["tokens"])
    assert np.abs(logits - expected(family)["logits"]).max() > 20 * LOGITS_ATOL


@pytest.mark.sampled(2)
@pytest.mark.parametrize("taps", [(1, 3, 4), (3, 5, 6), (2, 4, 6)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tap_off_by_one_layer_shows(family, taps):
    model = load_target(GOLDEN / family, dtype="float32")
    _, tapped, _ = forward(model, expected(family)["tokens"], taps)
    want = expected(family)["taps"].reshape(2, 41, -1)
    assert np.abs(tapped - want).max() > 20 * STATES_ATOL


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request) -> str:
    return request.param


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("chunk", [64, 7])
def test_the_engine_writes_the_greedy_text_of_transformers(family, chunk):
    want = expected(family)
    config = EngineConfig(
        num_draft=0, max_num_seqs=2, max_model_len=72, page_size=8, prefill_chunk=chunk,
        prefill_rows=2, max_logprobs=1,
    )  # fmt: skip
    engine = one_bucket(Engine(load_target(GOLDEN / family, dtype="float32"), None, config))
    done = engine.generate(want["tokens"].tolist(), SamplingParams(max_tokens=24, logprobs=1))
    assert [c.tokens for c in done] == want["greedy"].tolist()
    first = jax.nn.log_softmax(want["logits"][:, -1])
    for row, completion in zip(first, done, strict=True):
        assert abs(completion.logprobs[0].logprob - row.max()) < LOGITS_ATOL


def copy_with(family: str, folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """The golden folder with other config keys and more tensors."""
    raw = json.loads((GOLDEN / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    save_file(
        load_file(GOLDEN / family / "model.safetensors") | tensors, folder / "model.safetensors"
    )
    return folder


def random_biases(family: str) -> dict[str, np.ndarray]:
    """attention_bias as transformers has it in both families: q, k, v and o of every layer."""
    rng = np.random.default_rng(0)
    q = 4 * {"llama": 16, "qwen3": 32}[family]
    widths = {"q": q, "k": q // 2, "v": q // 2, "o": 64}
    return {
        f"model.layers.{i}.self_attn.{p}_proj.bias": rng.normal(size=n).astype(np.float32)
        for i in range(8)
        for p, n in widths.items()
    }


def test_attention_bias_is_added_to_all_four_projections(family, tmp_path):
    biases = random_biases(family)
    copy_with(family, tmp_path, {"attention_bias": True}, biases)
    model = load_target(tmp_path, dtype="float32")
    weights = {
        k: v.astype(np.float64) for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    project = lambda p, x: (
        x @ weights[f"model.layers.1.self_attn.{p}_proj.weight"].T
        + biases[f"model.layers.1.self_attn.{p}_proj.bias"]
    )
    x = np.random.default_rng(1).normal(size=(1, 9, 64))
    angles = rope_angles(model.config.rope, model.config.head_dim, jnp.arange(9)[None])
    q, k, v = (project(p, x).reshape(1, 9, -1, model.config.head_dim) for p in "qkv")
    attention = model.layers[1].attention
    norms = (attention.q_norm, attention.k_norm) if model.config.qk_norm else (lambda x: x,) * 2
    q, k = (
        apply_rope(norm(jnp.asarray(y, jnp.float32)), angles)
        for norm, y in zip(norms, (q, k), strict=True)
    )
    out = attention_of_heads(q, k, jnp.asarray(v, jnp.float32), window=None)
    want = project("o", np.asarray(out, np.float64).reshape(1, 9, -1))
    got, _ = attention(jnp.asarray(x, jnp.float32), angles, None, causal_attention)
    np.testing.assert_allclose(got.added_to(jnp.zeros(want.shape)), want, atol=1e-4)

    saved = tmp_path / "saved"
    save_target(model, saved, dtype="float32")
    assert load_file(saved / "model.safetensors").keys() == weights.keys()


REFUSED = {
    "biases the config does not state": ({}, True, "without a place in llama"),
    "biases the file does not hold": ({"attention_bias": True}, False, "q_proj.bias' is missing"),
    "biases of an MLP that the file does not "
    "hold": ({"mlp_bias": True}, False, "_proj.bias' is missing"),
    "no width": (
        {"hidden_size": None}, False,
        r"embed_tokens.weight has shape .* does not state hidden_size \(4096\)",
    ),
    "no depth": (
        {"num_hidden_layers": None}, False, r"is missing .* does not state num_hidden_layers "
                                            r"\(32\)",
    ),
    "more layers than the file": ({"num_hidden_layers": 9}, False, "is missing"),
    "fewer layers than the file": ({"num_hidden_layers": 7}, False, "without a place"),
    "another vocabulary": ({"vocab_size": 200}, False, "has shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_would_not_compute_what_they_should_are_refused(case, tmp_path):
    config, with_biases, message = REFUSED[case]
    copy_with("llama", tmp_path, config, random_biases("llama") if with_biases else {})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(tmp_path, dtype="float32")
    assert str(tmp_path) in str(caught.value)
