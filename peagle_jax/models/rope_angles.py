"""Rotary embeddings: frequencies with long-context scaling, and the angles of positions."""

import math

import jax
import jax.numpy as jnp

from peagle_jax.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def _llama3_frequencies(inv: jax.Array, scaling: Llama3Scaling) -> jax.Array:
    wavelength = 2 * math.pi / inv
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv / scaling.factor + smooth * inv
    return jnp.where(
        wavelength > low, inv / scaling.factor, jnp.where(wavelength < high, inv, blended)
    )


def _yarn_frequencies(
    inv: jax.Array, theta: float, head_dim: int, scaling: YarnScaling
) -> jax.Array:
    """High frequencies are kept, low ones divided by `factor`, with a linear ramp between."""

    def index(rotations: float) -> float:
        """Fractional index of the frequency with `rotations` periods in the original context."""
        period = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    stretched = jnp.clip(ramp, 0, 1)
    return inv / scaling.factor * stretched + inv * (1 - stretched)


def rope_frequencies(config: RopeConfig, head_dim: int) -> jax.Array:
    """Inverse frequencies [H/2], scaled by `config.scaling`, unless that is dynamic."""
    pairs = jnp.arange(0, head_dim, 2, dtype=jnp.float32)
    inv = config.theta ** (-pairs / head_dim)
    if isinstance(config.scaling, LinearScaling):
        inv = inv / config.scaling.factor
    elif isinstance(config.scaling, Llama3Scaling):
        inv = _llama3_frequencies(inv, config.scaling)
    elif isinstance(config.scaling, YarnScaling):
        inv = _yarn_frequencies(inv, config.theta, head_dim, config.scaling)
    num_rotated = int(config.rotary_share * head_dim / 2)
    return jnp.where(jnp.arange(head_dim // 2) < num_rotated, inv, 0.0)


def rope_angles(
    config: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., T, H/2] in float32 for integer positions [..., T]."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config, head_dim)
    factor = 1.0
    if isinstance(config.scaling, YarnScaling):
        factor = config.scaling.attention_factor or 0.1 * math.log(config.scaling.factor) + 1.0
    return factor * jnp.cos(angles), factor * jnp.sin(angles)
