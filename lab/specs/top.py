"""Workloads of supported models, for compile tests and benchmarks: the likeliest tokens of
drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.top import api

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""
REFERENCE_OPTIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False}
"""The autotuner of jaxlib 0.11.2 runs code for 224 rows of ranks that reads invalid addresses (on
an H200)."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Logits of `rows` drafts over `width` tokens."""

    rows: int
    width: int


SPECS = {
    "embedded": Spec(rows=7, width=8192),
    "embedded-32": Spec(rows=224, width=8192),
    "eagle-vocabulary": Spec(rows=7, width=32000),
    "qwen3-moe": Spec(rows=7, width=151936),
    "qwen3-moe-8": Spec(rows=56, width=151936),
    "qwen3-moe-32": Spec(rows=224, width=151936),
    "qwen3-moe-128": Spec(rows=896, width=151936),
    "gpt-oss": Spec(rows=7, width=201088),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and the shape of the values."""
    values = jax.ShapeDtypeStruct((spec.rows, spec.width), jnp.float32)
    return lambda values: api.top(values, api.COUNT, implementation="mosaic_gpu"), (values,)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`, with equal values in each row."""
    values = jax.random.normal(key, (spec.rows, spec.width), jnp.float32)
    return (jnp.round(values * 64) / 64,)
