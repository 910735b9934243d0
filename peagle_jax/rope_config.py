"""Configuration of rotary position embeddings: base, long-context scaling, partial rotation."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's rope scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over the frequencies, and `attention_factor` on cos and sin.

    `attention_factor` None is `0.1 ln(factor) + 1`; `truncate` rounds the ramp's ends to integers.
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 4096
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK scaling, as transformers defines it.

    For a text of n > `max_position` tokens the base is theta * (factor * n / max_position - factor
    + 1) ** (head_dim / (head_dim - 2)); for shorter texts it is theta. Beyond `max_position` every
    new token changes the rotation of all earlier keys, so cached keys would be wrong. The engine
    limits texts to `max_position`, where this scaling has no effect.
    """

    factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; it rotates pairs (i, i + head_dim / 2).

    Args:
      theta: base of the geometric frequency series.
      scaling: change of the frequencies for long contexts.
      rotary_share: share of the frequencies, from the first, that rotate; the others are 0 (Gemma
        4's "proportional" rope; frequency i remains theta^(-2i/head_dim)).
    """

    theta: float
    scaling: Scaling | None = None
    rotary_share: float = 1.0
