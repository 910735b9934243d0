"""Rows that are quantised in supported models, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import activations, dispatch

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows; spread copies each to `copies` rows."""

    kernel: Literal["quantize", "spread"] = "quantize"
    rows: int
    width: int
    copies: int = 8


SPECS = {
    **{f"qwen3-moe-{R}": Spec(rows=R, width=2048) for R in (1, 8, 12, 64, 256, 1024, 4096)},
    **{f"qwen3-moe-attention-{R}": Spec(rows=R, width=4096) for R in (8, 64, 256, 1024, 4096)},
    # The rows of all items, between the two products of the experts.
    **{f"qwen3-moe-inner-{R}": Spec(rows=R, width=768) for R in (512, 4096, 12288, 40960)},
    **{
        f"qwen3-moe-spread-{R}": Spec(kernel="spread", rows=R, width=2048)
        for R in (64, 256, 1024, 4096)
    },
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of x [rows, width][, slots [copies, rows]]."""
    size = spec.copies * spec.rows

    def run(x, *slots):
        from pallas_kernels.quantize import mosaic_gpu  # a slow import that CPU use does not need

        launch = dispatch.resolve("quantize", "mosaic_gpu")
        if spec.kernel == "quantize":
            rows = activations.quantize(x) if launch is None else mosaic_gpu.quantize(x, launch)
        elif launch is not None:
            rows = mosaic_gpu.spread_operand(x, *slots, size, True, launch)
        else:
            rows = activations.quantize(x[jnp.argsort(slots[0].reshape(-1)) % spec.rows])
        return tuple(rows)

    args = [jax.ShapeDtypeStruct((spec.rows, spec.width), jnp.bfloat16)]
    if spec.kernel == "spread":
        args.append(jax.ShapeDtypeStruct((spec.copies, spec.rows), jnp.int32))
    return run, tuple(args)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normal rows; slots are a permutation of the result's rows."""
    x = jax.random.normal(key, (spec.rows, spec.width)).astype(jnp.bfloat16)
    if spec.kernel == "quantize":
        return (x,)
    slots = jax.random.permutation(key, spec.copies * spec.rows)
    return x, slots.reshape(spec.copies, spec.rows).astype(jnp.int32)


def compared(spec: Spec, results: tuple) -> tuple:
    """Values and scales of the rows; scales of padding rows are undefined."""
    values, scale = results
    return values, scale[:, : len(values)]
