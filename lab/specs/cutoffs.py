"""Workloads of supported models, for compile tests and benchmarks: the rows that a round
verifies."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cutoffs import api

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Logits of `rows` over `width` tokens, of which all have the same rules.

    `spread` is the standard deviation of the logits: with 3 most of the mass lies in few tokens, as
    in trained models, and with 1, as of random weights, in most of them.
    """

    rows: int
    width: int
    top_k: int = 20
    top_p: float = 0.8
    spread: float = 3.0


SPECS = {
    "embedded-32": Spec(rows=256, width=8192),
    "eagle-vocabulary": Spec(rows=64, width=32000),
    "qwen3-moe": Spec(rows=8, width=151936),
    "qwen3-moe-8": Spec(rows=64, width=151936),
    "qwen3-moe-8-top-k": Spec(rows=64, width=151936, top_p=1.0),
    "qwen3-moe-8-top-p": Spec(rows=64, width=151936, top_k=0, top_p=0.9),
    "qwen3-moe-8-flat": Spec(rows=64, width=151936, top_k=0, top_p=0.9, spread=1.0),
    "qwen3-moe-32": Spec(rows=256, width=151936),
    "qwen3-moe-32-flat": Spec(rows=256, width=151936, top_k=0, top_p=0.9, spread=1.0),
    "qwen3-moe-128": Spec(rows=1024, width=151936),
    "gpt-oss": Spec(rows=64, width=201088),
    "gemma": Spec(rows=64, width=262144, top_k=64, top_p=0.95),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and the shapes of the logits and of the filters."""
    shape = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    filters = [shape(dtype, spec.rows) for dtype in (jnp.float32, jnp.int32, jnp.float32)]
    run = lambda *args: api.cutoffs(*args, implementation="mosaic_gpu")
    return run, (shape(jnp.float32, spec.rows, spec.width), *filters)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random logits and the filters, for `build`."""
    logits = spec.spread * jax.random.normal(key, (spec.rows, spec.width), jnp.float32)
    filters = (1.0, jnp.float32), (spec.top_k, jnp.int32), (spec.top_p, jnp.float32)
    return logits, *(jnp.full(spec.rows, value, dtype) for value, dtype in filters)
