"""Rotary position embeddings: base, scaling for long texts, and how much of a head turns."""

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
    """NTK scaling by the length of the text, as transformers defines it.

    A text of n tokens longer than `max_position` turns by theta * (factor * n / max_position - factor + 1)
    ** (head_dim / (head_dim - 2)); a shorter one by theta itself. Past `max_position` each further token
    changes the frequencies of all keys before it, so keys that a cache holds already turned would be
    wrong. The engine stays within `max_position`, where this scaling is exactly none.
    """

    factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over halves.

    Args:
      theta: base of the geometric frequency series.
      scaling: how frequencies change for long contexts.
      rotary_share: the first share of the frequencies turns, the rest stands still (Gemma 4's
        "proportional" rope; frequency i is still theta^(-2i/head_dim)).
    """

    theta: float
    scaling: Scaling | None = None
    rotary_share: float = 1.0
