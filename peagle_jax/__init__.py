"""P-EAGLE in JAX: lossless parallel speculative decoding. Start at `load`, then read `step`.

Names are imported lazily, so that `peagle-generate --help` and its argument errors do not import
jax. `peagle_jax.method.verify` is the module; the acceptance rule is
`peagle_jax.method.verify.verify`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle_jax.cli.loading import load
    from peagle_jax.config import (
        ConfigError,
        DrafterConfig,
        EngineConfig,
        RopeConfig,
        TargetConfig,
    )
    from peagle_jax.engine.engine import Engine
    from peagle_jax.engine.host.completion import Completion
    from peagle_jax.method.step import prefill, speculative_step
    from peagle_jax.sampling_params import SamplingParams
    from peagle_jax.training.logprobs import logprobs

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
    "logprobs",
    "prefill",
    "speculative_step",
]

_HOMES = {
    "Completion": "engine.host.completion",
    "Engine": "engine.engine",
    "SamplingParams": "sampling_params",
    "load": "cli.loading",
    "logprobs": "training.logprobs",
    "prefill": "method.step",
    "speculative_step": "method.step",
}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
