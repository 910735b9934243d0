"""Targets whose kernels prefetch the weights of the next kernels (`pallas_kernels.prefetch`).

The norm before attention prefetches the projections of attention, and the norm before the MLP the weights of the MLP;
those of experts only if the rows of a call choose nearly all of them.
"""

import jax
from flax import nnx

from peagle_jax.config import EngineConfig


def with_prefetch(model: nnx.Module, config: EngineConfig) -> nnx.Module:
    """A copy of `model`, with the same weights, that prefetches if `config.prefetch_weights`; results stay the same."""
    if not config.prefetch_weights:
        return model
    copy = jax.tree.map(lambda leaf: leaf, model)
    for _, module in nnx.iter_modules(copy):
        if hasattr(module, "prefetches"):
            module.prefetches = True
    return copy
