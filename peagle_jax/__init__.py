"""P-EAGLE in JAX: lossless parallel speculative decoding. Start at `load`, then read `step`."""

from peagle_jax.config import (
    ConfigError,
    DrafterConfig,
    EngineConfig,
    RopeConfig,
    SamplingParams,
    TargetConfig,
)
from peagle_jax.engine.engine import Completion, Engine
from peagle_jax.loading import load
from peagle_jax.step import prefill, speculative_step
from peagle_jax.verify import verify

__all__ = [
    "Completion",
    "ConfigError",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "RopeConfig",
    "SamplingParams",
    "TargetConfig",
    "load",
    "prefill",
    "speculative_step",
    "verify",
]
