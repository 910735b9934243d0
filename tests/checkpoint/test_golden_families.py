"""Every family and the quantised files against transformers, and with one rule broken at a time."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from peagle_jax.checkpoint import load_target
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.engine import Engine
from peagle_jax.models import Decoder
from peagle_jax.models.layers import Delta
from peagle_jax.rope_config import DynamicScaling, LinearScaling
from peagle_jax.sampling_params import SamplingParams
from tests import tiny
from tests.programs import one_bucket
from tests.tiny import causal_attention

pytestmark = pytest.mark.usefixtures("programs_without_controls")

GOLDEN = Path(__file__).parents[1] / "golden"
TAPS = (2, 4, 5)
LOGITS_ATOL = 2e-4  # logits reach 10: a few float32 steps summed over eight layers
STATES_ATOL = 5e-4  # residual streams reach 30
NAMES = (
    "gpt_oss-mxfp4", "gpt_oss-bf16", "qwen3_moe-bf16", "qwen3_moe-fp8", "qwen3-fp8-channel",
    "llama-fp8-tensor", "llama", "qwen3", "mistral", "qwen2", "gemma4",
)  # fmt: skip


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "expected" / f"{name}.safetensors")


def load(name: str) -> Decoder:
    return load_target(GOLDEN / name, dtype="float32")


def forward(model: Decoder, tokens):
    """Logits, taps and last stream. Not jitted: the operations compile once for all variants."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    last, tapped, _ = model(tokens, positions, [None] * 8, causal_attention, taps=TAPS)
    return model.unembed(last), tapped, last


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_taps_equal_those_of_transformers(name):
    want, model = expected(name), load(name)
    assert model.config.default_taps == TAPS
    logits, taps, last = forward(model, want["tokens"])
    np.testing.assert_allclose(logits, want["logits"], atol=LOGITS_ATOL)
    np.testing.assert_allclose(taps, want["taps"].reshape(taps.shape), atol=STATES_ATOL)
    np.testing.assert_allclose(last, want["last"], atol=STATES_ATOL)


def test_the_highest_tap_is_what_leaves_the_last_layer():
    want, model = expected("gemma4"), load("gemma4")
    tokens = jnp.asarray(want["tokens"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, tapped, _ = model(tokens, positions, [None] * 8, causal_attention, taps=(2, 8))
    np.testing.assert_allclose(tapped[..., 64:], want["last"], atol=STATES_ATOL)


def test_dynamic_rope_is_no_scaling_until_the_text_is_longer_than_the_positions():
    """With one more token transformers rotates all keys differently: the engine stops before."""
    want, model = expected("mistral"), load("mistral")
    limit = model.config.max_position
    assert model.config.rope.scaling == DynamicScaling(factor=4.0)
    assert want["long_tokens"].shape == (1, limit + 1)
    logits, _, _ = forward(model, want["long_tokens"])
    np.testing.assert_allclose(logits[:, limit - 1], want["limit_logits"], atol=LOGITS_ATOL)
    assert np.abs(logits[:, limit] - want["beyond_logits"]).max() > 20 * LOGITS_ATOL


@pytest.mark.slow
def test_the_engine_keeps_dynamic_rope_within_its_positions():
    prompt, model = expected("mistral")["tokens"][0].tolist(), load("mistral")
    config = EngineConfig(num_draft=0, max_num_seqs=1, max_model_len=200, page_size=8)
    engine = Engine(model, None, config)
    assert engine.config.max_model_len == model.config.max_position == 96
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=200, ignore_eos=True))
    assert len(prompt) + len(done.tokens) == 96
    with pytest.raises(
        ConfigError, match=r"max_model_len=4096 .* rope_type dynamic .* at most 96 is"
    ):
        Engine(model, None, replace(config, max_model_len=4096))


def greedy(name: str, head, num_draft: int) -> list[list[int]]:
    config = EngineConfig(
        num_draft=num_draft, max_num_seqs=2, max_model_len=72, page_size=8, prefill_chunk=32,
        prefill_rows=2,
    )  # fmt: skip
    engine = one_bucket(Engine(load(name), head, config))
    prompts = expected(name)["tokens"].tolist()
    return [c.tokens for c in engine.generate(prompts, SamplingParams(max_tokens=24))]


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_writes_the_greedy_text_of_transformers(name):
    assert greedy(name, None, 0) == expected(name)["greedy"].tolist()


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "qwen3_moe-fp8", "mistral", "qwen2", "gemma4"])
def test_drafting_does_not_change_it(name):
    width = expected(name)["last"].shape[-1]
    sizes = dict(vocab_size=256, draft_vocab_size=256, target_hidden_size=width, taps=TAPS)
    assert greedy(name, tiny.head(**sizes), 5) == expected(name)["greedy"].tolist()


def attention(**changes):
    """Every layer's attention as another config says; a rule for the layers that it changes."""

    def apply(model: Decoder):
        for layer in model.layers:
            old = layer.attention.config
            new = {k: v(old) if callable(v) else v for k, v in changes.items()}
            layer.attention.config = replace(old, **new)

    return apply


def window(change):
    return attention(window=lambda old: None if old.window is None else change(old.window))


def first_full(count: int):
    """The first `count` layers see everything, the others slide."""

    def apply(model: Decoder):
        for i, layer in enumerate(model.layers):
            width = None if i < count else 8
            layer.attention.config = replace(layer.attention.config, window=width)

    return apply


def config(change):
    def apply(model: Decoder):
        model.config = replace(model.config, **change(model.config))

    return apply


def rope(**changes):
    return config(lambda c: dict(rope=replace(c.rope, **changes)))


def scaling(**changes):
    scaled = lambda c: replace(c.rope, scaling=replace(c.rope.scaling, **changes))
    return config(lambda c: dict(rope=scaled(c)))


def wide_rope(**changes):
    wide = lambda c: replace(c.global_attention, rope=replace(c.global_attention.rope, **changes))
    return config(lambda c: dict(global_attention=wide(c)))


def experts(change):
    """Every layer's mixture under another config."""

    def apply(model: Decoder):
        for layer in model.layers:
            layer.mlp.config = replace(layer.mlp.config, **change(layer.mlp.config))

    return apply


def routing(**changes):
    return experts(lambda c: dict(experts=replace(c.experts, **changes)))


def weights(find, change, layers=slice(None)):
    """A parameter of some layers changed: `change` maps its values."""

    def apply(model: Decoder):
        for layer in list(model.layers)[layers]:
            param = find(layer)
            param.set_value(jnp.asarray(change(np.asarray(param[...]))))

    return apply


def without(name: str):
    def apply(model: Decoder):
        for layer in model.layers:
            setattr(layer.attention, name, nnx.data(None))

    return apply


class Through:
    """In place of an RMSNorm: the stream as it is."""

    def after(self, h: jax.Array, delta: Delta, out_dtype=None) -> tuple[jax.Array, jax.Array]:
        h = delta.added_to(h)
        return h, h if out_dtype is None else h.astype(out_dtype)


def instead_of(name: str, norm: Through | None):
    """A norm of every layer, replaced; None: a delta without a norm."""

    def apply(model: Decoder):
        for layer in model.layers:
            setattr(layer, name, nnx.data(norm))

    return apply


zero, one = np.zeros_like, np.ones_like
swap = lambda x: x[:, ::-1].copy()
interleave = lambda x: x.swapaxes(1, 2).reshape(x.shape).copy()
roll = lambda x: np.roll(x, 1, axis=-2)
halves = lambda x: np.roll(x, len(x) // 2, axis=0)
nibbles = lambda x: (x >> 4) | (x << 4)
mean = lambda x: np.full_like(x, x.mean())

MOE = {
    "gate for up": weights(lambda x: x.mlp.gate_up.weight, swap),
    "one expert fewer": routing(top_k=1),
    "experts in another order": weights(lambda x: x.mlp.down.weight, lambda w: np.roll(w, 1, 0)),
}
GPT_OSS = MOE | {
    "no sinks": without("sinks"),
    "no window": window(lambda width: None),
    "window off by one": window(lambda width: width - 1),
    "no yarn": rope(scaling=None),
    "yarn with whole ends": scaling(truncate=True),
    "yarn without its factor on the scores": scaling(attention_factor=1.0),
    "yarn of another original length": scaling(original_max_position=256),
    "no clamp": experts(lambda c: dict(swiglu_limit=1e9)),
    "no router bias": weights(lambda x: x.mlp.router.bias, zero),
    "no bias of gate and up": weights(lambda x: x.mlp.gate_up.bias, zero),
    "bias of gate and up as stored": weights(lambda x: x.mlp.gate_up.bias, interleave),
    "no bias of down": weights(lambda x: x.mlp.down.bias, zero),
    "no bias of q, k and v": weights(lambda x: x.attention.qkv.bias, zero),
    "no bias of the output": weights(lambda x: x.attention.out.bias, zero),
}
SPARSE, DENSE = slice(5, None, 2), slice(0, None, 2)  # layers of qwen3_moe-fp8
BROKEN = {
    "gpt_oss-bf16": GPT_OSS | {
        "rows of gate and up as stored": weights(lambda x: x.mlp.gate_up.weight, interleave),
    },
    "gpt_oss-mxfp4": GPT_OSS | {
        "high nibble first": weights(lambda x: x.mlp.down.weight, nibbles),
        "scales of gate and up as stored": weights(lambda x: x.mlp.gate_up.scale, interleave),
        "scales twice as large": weights(lambda x: x.mlp.down.scale, lambda s: s + 1),
    },
    "qwen3_moe-bf16": MOE | {
        "weights that do not sum to one": routing(normalize=False),
        "no q norm": weights(lambda x: x.attention.q_norm.weight, one),
        "no k norm": weights(lambda x: x.attention.k_norm.weight, one),
        "another theta": rope(theta=1e6),
    },
    "qwen3_moe-fp8": {
        "scales of another expert": weights(
            lambda x: x.mlp.down.scale, lambda s: np.roll(s, 1, axis=0), SPARSE
        ),
        "gate's scales for up": weights(lambda x: x.mlp.gate_up.scale, swap, SPARSE),
        "gate for up in dense layers": weights(lambda x: x.mlp.gate_up.weight, halves, DENSE),
        "gate's scales for up in dense "
        "layers": weights(lambda x: x.mlp.gate_up.scale, halves, DENSE),
        "scales of other columns": weights(
            lambda x: x.mlp.gate_up.scale, lambda s: s[..., ::-1].copy()
        ),
        "scales of other rows": weights(
            lambda x: x.attention.qkv.scale, lambda s: np.roll(s, 36, 0)
        ),
        "one scale a matrix": weights(lambda x: x.attention.out.scale, mean),
        # q's 144 rows end inside its second block: the block does not run on into k.
        "one grid of blocks over q, k and v": weights(
            lambda x: x.attention.qkv.scale,
            lambda s: np.concatenate([s[:128], np.repeat(s[128:129], len(s) - 128, 0)]),
        ),
    },
    "qwen3-fp8-channel": {
        "scales of other rows": weights(lambda x: x.mlp.down.scale, roll),
        "one scale a matrix": weights(lambda x: x.attention.qkv.scale, mean),
    },
    "llama-fp8-tensor": {
        "q's scale for k and v": weights(
            lambda x: x.attention.qkv.scale, lambda s: np.full_like(s, s[0, 0])
        ),
        "gate's scale for up": weights(
            lambda x: x.mlp.gate_up.scale, lambda s: np.full_like(s, s[0, 0])
        ),
        "no linear scaling": rope(scaling=None),
        "another linear factor": rope(scaling=LinearScaling(factor=3.0)),
        "no bias of q, k and v": weights(lambda x: x.attention.qkv.bias, zero),
        "no bias of the output": weights(lambda x: x.attention.out.bias, zero),
        "no bias of gate and up": weights(lambda x: x.mlp.gate_up.bias, zero),
        "gate's bias for up": weights(lambda x: x.mlp.gate_up.bias, halves),
        "no bias of down": weights(lambda x: x.mlp.down.bias, zero),
    },
    "llama": {
        "no llama3 scaling": rope(scaling=None),
        "another factor": scaling(factor=7.0),
        "another low frequency": scaling(low_freq_factor=2.0),
        "another high frequency": scaling(high_freq_factor=3.0),
        "another original length": scaling(original_max_position=128),
    },
    "qwen3": {
        "another theta": rope(theta=5e5),
        "no q norm": weights(lambda x: x.attention.q_norm.weight, one),
        "no k norm": weights(lambda x: x.attention.k_norm.weight, one),
    },
    "mistral": {
        "no window": window(lambda width: None),
        "window off by one": window(lambda width: width + 1),
        "a window short by one": window(lambda width: width - 1),
        "linear scaling": rope(scaling=LinearScaling(factor=4.0)),
        "another theta": rope(theta=1e6),
    },
    "qwen2": {
        "no bias of q, k and v": weights(lambda x: x.attention.qkv.bias, zero),
        "biases of other rows": weights(lambda x: x.attention.qkv.bias, lambda b: np.roll(b, 1)),
        "no window": window(lambda width: None),
        "window off by one": window(lambda width: width + 1),
        "a window in all layers": attention(window=8),
        "no window in layer 5": first_full(6),
        "a window in layer 4": first_full(4),
        "another theta": rope(theta=1e4),
    },
    "gemma4": {
        "no layer scalar": weights(lambda x: x.layer_scalar, one),
        "no window": window(lambda width: None),
        "window off by one": window(lambda width: width + 1),
        "every frequency turns": wide_rope(rotary_share=1.0),
        "theta of the sliding layers": wide_rope(theta=1e4),
        "no soft cap": config(lambda c: dict(logit_softcap=None)),
        "no embedding scale": config(lambda c: dict(family="llama")),
        "scores scaled": attention(scale=None),
        "no norm of values": attention(value_norm=False),
        "gate for up": weights(
            lambda x: x.mlp.gate_up.weight, lambda w: np.concatenate([w[40:], w[:40]])
        ),
        "no norm after attention": instead_of("post_attention_norm", None),
        "no norm before the MLP": instead_of("pre_mlp_norm", Through()),
        "no norm after the MLP": instead_of("post_mlp_norm", None),
        "norm weights of one": weights(lambda x: x.input_norm.weight, one),
        "no q norm": weights(lambda x: x.attention.q_norm.weight, one),
        "no k norm": weights(lambda x: x.attention.k_norm.weight, one),
    },
}  # fmt: skip
CASES = [(name, rule) for name, rules in BROKEN.items() for rule in rules]


@pytest.mark.sampled(2, slow=10)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_broken_rule_shows_in_the_logits(name, rule):
    model = load(name)
    BROKEN[name][rule](model)
    logits, _, _ = forward(model, expected(name)["tokens"])
    assert np.abs(logits - expected(name)["logits"]).max() > 20 * LOGITS_ATOL
