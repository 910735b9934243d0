"""The program that copies the rings of all layers with a sliding window from one row of the cache
to another."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from peagle_jax.method.step import State
from peagle_jax.models.cache import RingCache, copy_rings, rings_of, with_rings

Operands = tuple[list[RingCache], np.int32, np.int32]


def operands(state: State, source: int = 0, target: int = 0) -> Operands:
    """The rings of target and drafter, and two rows; see `cache.copy_rings`."""
    return rings_of(state.target_cache, state.drafter_cache), np.int32(source), np.int32(target)


def program(rings: list[RingCache]) -> Callable:
    """A function of `operands` under `jax.jit`. It consumes the rings, and keeps their shares on
    devices."""

    def sharding(x: jax.Array) -> NamedSharding | None:
        return x.sharding if isinstance(x.sharding, NamedSharding) else None

    return jax.jit(copy_rings, donate_argnums=0, out_shardings=jax.tree.map(sharding, rings))


def with_copied(state: State, copied: list[RingCache]) -> State:
    """The state with the result of `program`."""
    rings, caches = iter(copied), (state.target_cache, state.drafter_cache)
    target_cache, drafter_cache = (with_rings(cache, rings) for cache in caches)
    return replace(state, target_cache=target_cache, drafter_cache=drafter_cache)
