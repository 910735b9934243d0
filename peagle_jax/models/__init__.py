"""Target models: `build(config)` makes one; each returns its hidden states and the drafter's taps."""

from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.models.dense import Dense

__all__ = ["Dense", "build"]


def build(config: TargetConfig, *, dtype, rngs: nnx.Rngs) -> Dense:
    """A randomly initialised target of `config.family`."""
    return Dense(config, dtype=dtype, rngs=rngs)
