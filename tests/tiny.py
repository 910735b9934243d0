"""Tiny random models for tests: real structure, sizes that compile in a second or two."""

from dataclasses import replace

import jax
from flax import nnx

from peagle_jax.config import DrafterConfig, RopeConfig, TargetConfig
from peagle_jax.drafter import DraftHead
from peagle_jax.models import Dense, build

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


def loud(module, seed: int):
    """The module with every matrix redrawn at a scale that makes its output vary with its input."""
    leaves, structure = jax.tree.flatten(module)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    redraw = lambda leaf, key: (
        0.3 * jax.random.normal(key, leaf.shape, leaf.dtype) if leaf.ndim == 2 else leaf
    )
    return jax.tree.unflatten(structure, [redraw(*pair) for pair in zip(leaves, keys, strict=True)])


def target(seed: int = 0, dtype: str = "float32", **changes) -> Dense:
    config = replace(TARGET, **changes)
    return loud(build(config, dtype=dtype, rngs=nnx.Rngs(seed)), seed)


def head(method: str = "peagle", seed: int = 1, dtype: str = "float32", **changes) -> DraftHead:
    layers = {"num_layers": 1} if method == "eagle3" else {}
    config = replace(HEAD, **({"method": method} | layers | changes))
    return loud(DraftHead(config, dtype=dtype, rngs=nnx.Rngs(seed)), seed)


def causal_attention(q, k, v, cache: None, *, window: int | None):
    """`layers.Attend` without a cache: what attention over pages must equal."""
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local), None
