"""Workloads of supported models, for compile tests and benchmarks: seven drafts, selectors of rank
256."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_walk import api

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """`sequences` of `drafts` drafts, with tables of `rank` columns for `vocab` tokens."""

    sequences: int
    drafts: int = 7
    vocab: int = 8192
    rank: int = 256


SPECS = {
    "embedded": Spec(sequences=1),
    "embedded-3": Spec(sequences=1, drafts=3),
    "embedded-32": Spec(sequences=32),
    "qwen3-moe": Spec(sequences=1, vocab=151936),
    "qwen3-moe-32": Spec(sequences=32, vocab=151936),
    "most-drafts": Spec(sequences=8, drafts=13),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of ids, values, states and both tables."""
    B, J, C = spec.sequences, spec.drafts, api.CANDIDATES
    table = jax.ShapeDtypeStruct((spec.vocab, spec.rank), jnp.bfloat16)
    args = (
        jax.ShapeDtypeStruct((B, J, C), jnp.int32),
        jax.ShapeDtypeStruct((B, J, C), jnp.float32),
        jax.ShapeDtypeStruct((B, J, spec.rank), jnp.float32),
        table,
        table,
    )
    run = lambda *args: api.candidate_walk(*args, scale=1 / 16, implementation="mosaic_gpu")
    return run, args


def bytes(spec: Spec) -> int:
    """Bytes that the kernel moves: of the tables it reads the rows of the candidates."""
    B, J, C = spec.sequences, spec.drafts, api.CANDIDATES
    rows = 2 * (J - 1) * C * spec.rank * 2
    return B * (8 * J * C + 4 * J * spec.rank + rows + 4 * (J - 1) * C * C + 4 * J)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; values fall along the candidates, as those of `top` do."""
    keys = jax.random.split(key, 5)
    ids, values, *floats = build(spec)[1]
    arrays = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys[2:], floats, strict=True)]
    drawn = jax.random.randint(keys[0], ids.shape, 0, spec.vocab)
    falling = -jnp.sort(-jax.random.normal(keys[1], values.shape, values.dtype), axis=-1)
    return drawn, falling, *arrays
