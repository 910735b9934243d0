"""Tiny random models for tests: real structure, sizes that compile in a second or two."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import PyTreeDef

from peagle_jax.config import (
    BlockConfig,
    DrafterConfig,
    ExpertsConfig,
    GlobalAttention,
    TargetConfig,
)
from peagle_jax.method.block_head import make_head
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder, build
from peagle_jax.models.layers import AttentionRows
from peagle_jax.rope_config import DynamicScaling, LinearScaling, RopeConfig, YarnScaling

TARGET = TargetConfig(
    family="qwen3",
    vocab_size=128,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_position=512,
    tie_embeddings=False,
    attention_bias=False,
    qk_norm=True,
)

HEAD = DrafterConfig(
    method="peagle",
    vocab_size=128,
    draft_vocab_size=128,
    hidden_size=32,
    target_hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    num_taps=3,
    taps=(0, 1, 2),
    mask_token_id=1,
)

_BLOCK = dict(method="dflash", qk_norm=True, own_embedding=False, own_lm_head=False)
METHODS = {
    "eagle3": dict(method="eagle3", num_layers=1),
    "selector": dict(selector_rank=8),
    "dflash": _BLOCK | dict(block=BlockConfig(causal=(False, False))),
    "dflash2": _BLOCK
    | dict(
        block=BlockConfig(causal=(False, True), conv_taps=2, conv_group=8),
        selector_rank=8,
        sliding_windows=(9, 5),
        trained_num_draft=8,
    ),
    "dspark": _BLOCK
    | dict(
        block=BlockConfig(causal=(False, False), drafts_from_newest=True, markov_rank=8),
        own_embedding=True,
        own_lm_head=True,
    ),
}
"""What the head of a method has other than `HEAD`."""

ONE_LAYER = dict(num_layers=1)
HEAD_OF_ONE_LAYER = dict(num_layers=1, num_taps=1, taps=(0,))
"""Changes of `target` and `head` for tests that are not about the model: they compile in four
fifths of the time.
"""

FAMILIES = {
    "llama": dict(family="llama", qk_norm=False, num_layers=3),
    "mistral": dict(
        family="mistral",
        qk_norm=False,
        sliding_windows=(6, 6, 6),
        max_position=80,
        rope=RopeConfig(theta=1e4, scaling=DynamicScaling(factor=2.0)),
    ),
    "qwen2": dict(
        family="qwen2",
        qk_norm=False,
        attention_bias=True,
        tie_embeddings=True,
        sliding_windows=(None, 6, 6),
    ),
    "qwen3_moe": dict(family="qwen3_moe", experts=ExpertsConfig(num_experts=6, top_k=2)),
    "gpt_oss": dict(
        family="gpt_oss",
        qk_norm=False,
        attention_bias=True,
        sliding_windows=(6, None, 6),
        experts=ExpertsConfig(num_experts=6, top_k=2),
        swiglu_limit=2.0,
        rope=RopeConfig(theta=1e4, scaling=YarnScaling(factor=8.0, original_max_position=32)),
    ),
    "gemma4": dict(
        family="gemma4",
        sliding_windows=(6, None, 5),
        logit_softcap=5.0,
        tie_embeddings=True,
        global_attention=GlobalAttention(
            num_kv_heads=1,
            head_dim=16,
            rope=RopeConfig(theta=1e6, rotary_share=0.25),
            shared_kv=True,
        ),
    ),
}
"""What each family changes in `TARGET`; windows of a few tokens, so that every test crosses them.
"""

VARIANTS = {
    "llama with biases": dict(
        family="llama",
        qk_norm=False,
        attention_bias=True,
        mlp_bias=True,
        rope=RopeConfig(theta=1e4, scaling=LinearScaling(factor=4.0)),
    ),
    "qwen3_moe with dense layers": dict(
        family="qwen3_moe",
        experts=ExpertsConfig(num_experts=6, top_k=2, dense_layers=(0, 2), dense_size=40),
    ),
}
"""Other forms of a family; what a test shows of the method need not be shown again for each."""

TARGETS = FAMILIES | VARIANTS


def loud(module, seed: int, *, vectors: bool = False):
    """The module with every matrix redrawn at a scale that makes its output vary with its input.

    With `vectors`, norms, biases, sinks and scalars are moved as well.
    """
    leaves, structure = jax.tree.flatten(module)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def redraw(leaf, key):
        if leaf.ndim < 2 and not vectors:
            return leaf
        noise = 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
        return noise if leaf.ndim > 1 else leaf + noise

    return jax.tree.unflatten(structure, [redraw(*pair) for pair in zip(leaves, keys, strict=True)])


@functools.cache
def _parts(
    config: TargetConfig | DrafterConfig, seed: int, dtype: str, vectors: bool
) -> tuple[list[jax.Array], PyTreeDef]:
    """Leaves and structure of a random model. To draw them costs more than many a test."""
    make = build if isinstance(config, TargetConfig) else make_head
    model = loud(make(config, dtype=dtype, rngs=nnx.Rngs(seed)), seed, vectors=vectors)
    return jax.tree.flatten(model)


def target(seed: int = 0, dtype: str = "float32", **changes) -> Decoder:
    leaves, structure = _parts(replace(TARGET, **changes), seed, dtype, "family" in changes)
    return jax.tree.unflatten(structure, leaves)


def head(method: str = "peagle", seed: int = 1, dtype: str = "float32", **changes) -> DraftHead:
    """A random head of a method; "selector" is P-EAGLE with one."""
    config = replace(HEAD, **(METHODS.get(method, {}) | changes))
    leaves, structure = _parts(config, seed, dtype, False)
    return jax.tree.unflatten(structure, leaves)


def causal_attention(rows: AttentionRows, cache: None, *, window: int | None, scale, sinks):
    """`layers.Attend` without a cache, by the definition: what attention over pages must equal."""
    return attention_of_heads(*rows.heads(), window=window, scale=scale, sinks=sinks), None


_forward = jax.jit(
    lambda model, tokens: model.unembed(
        model(
            tokens,
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            [None] * model.config.num_layers,
            causal_attention,
        )[0]
    )
)


def logits(model: Decoder, tokens) -> np.ndarray:
    """[B, T, V] by a forward pass over whole texts [B, T] without any cache."""
    return np.asarray(_forward(model, np.asarray(tokens, np.int32)))


def greedy(model: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The next tokens of each prompt by `logits`: the definition of greedy output."""
    rows = np.zeros((len(prompts), count + max(map(len, prompts))), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    everyone, ends = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
    for step in range(count):
        best = logits(model, rows)[everyone, ends + step - 1].argmax(-1)
        rows[everyone, ends + step] = best
    return [row[n : n + count].tolist() for row, n in zip(rows, ends, strict=True)]


class GivenHeads(NamedTuple):
    """Rows for `layers.Attend` whose q [B, T, N, H], k and v [B, T, K, H] are chosen by a test."""

    q: jax.Array
    k: jax.Array
    v: jax.Array

    def heads(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.q, self.k, self.v


def attend_to(attend, q, k, v, *, window: int | None) -> jax.Array:
    """Output [B, T, N, H] of a `layers.Attend` without cache, scale or sinks."""
    scale = q.shape[-1] ** -0.5
    return attend(GivenHeads(q, k, v), None, window=window, scale=scale, sinks=None)[0]


def attention_of_heads(q, k, v, *, window: int | None, scale=None, sinks=None):
    """Attention output [B, T, N, H] over k and v [B, T, K, H], by the definition."""
    T, H = q.shape[1], q.shape[-1]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    behind = jnp.arange(T)[:, None] - jnp.arange(T)
    visible = (behind >= 0) & (behind < (T if window is None else window))
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :T]
    return jnp.einsum("bnts,bsnh->btnh", weights, v)
