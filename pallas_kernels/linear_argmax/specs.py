"""Workloads of supported models, for compile tests and benchmarks: greedy drafts of the LM head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_gemm import specs as block_gemm
from pallas_kernels.linear_argmax import api

CHIPS = api.CHIPS
MMA = block_gemm.MMA


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows times a bfloat16 weight [outputs, inputs], and the largest of each row."""

    rows: int
    outputs: int
    inputs: int


_HEADS = {"qwen3-moe": (151936, 2048), "gpt-oss": (201088, 2880), "embedded": (8192, 256)}
# 7 drafts of 1, 8, 32 and 128 sequences; the one of 7 is computed as 8, see `activations.whole_rows`.
_ROWS = (8, 56, 224, 896)

SPECS = {
    **{
        f"{model}-argmax-{rows}": Spec(rows=rows, outputs=N, inputs=K)
        for model, (N, K) in _HEADS.items()
        for rows in _ROWS
    },
    "ragged-argmax": Spec(rows=21, outputs=1000, inputs=448),
}


def build(spec: Spec, config: Any = None) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernels, and the shapes of x and the weight."""
    shape = jax.ShapeDtypeStruct
    args = (
        shape((spec.rows, spec.inputs), jnp.bfloat16),
        shape((spec.outputs, spec.inputs), jnp.bfloat16),
    )
    run = lambda x, weight: api.linear_argmax(x, weight, implementation="mosaic_gpu", config=config)
    return run, args
