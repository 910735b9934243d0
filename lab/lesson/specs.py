"""Workloads of the ladder (lab/ladder.md), for compile tests and `python -m lab ladder`."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from lab.lesson import reference
from lab.specs.block_gemm import random_leaf, weight_of
from pallas_kernels import dispatch
from pallas_kernels.moe.worklist import make_worklist

CHIPS = (90,)
MMA = {90: "wgmma"}

Step = Literal["1_wgmma", "2_ring", "3_roles", "4_persistent", "5_fp8", "6_grouped"]
STEPS: tuple[Step, ...] = Step.__args__
TOKENS = 8
"""Rows of an item of step 6."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One step of the ladder: `rows` bfloat16 rows times a weight [outputs, inputs].

    Attributes:
      weight: name of the weight.
      experts: step 6: experts that have a weight of this shape.
      top_k: step 6: experts that each row chooses.
      touched: step 6: different experts that all rows choose; about as many as random routing
        gives.
    """

    step: Step
    weight: str
    rows: int
    outputs: int
    inputs: int
    experts: int = 0
    top_k: int = 0
    touched: int = 0

    @property
    def bytes(self) -> float:
        """Bytes of the weights that are read, of x and of the result, each once."""
        item = 2 if self.step < "5" else 1 + 4 / 128**2
        weights = max(1, self.touched) * self.outputs * self.inputs * item
        rows = self.touched * TOKENS or self.rows
        return weights + 2 * rows * (self.inputs + self.outputs)


# A weight large enough to reach the bandwidth, and one with fewer tiles of rows than
# multiprocessors.
_DENSE = {"llama-8b-gate-up": (28672, 4096), "qwen3-moe-qkv": (5120, 2048)}
_EXPERTS = {"qwen3-moe-gate-up": (1536, 2048), "qwen3-moe-down": (2048, 768)}

SPECS = {
    f"{spec.step}-{spec.weight}-{spec.rows}": spec
    for spec in [
        *(
            Spec(step=step, weight=name, rows=rows, outputs=N, inputs=K)
            for step in STEPS[:-1]
            for name, (N, K) in _DENSE.items()
            for rows in (8, 64)
        ),
        *(
            Spec(
                step="6_grouped",
                weight=name,
                rows=rows,
                outputs=N,
                inputs=K,
                experts=128,
                top_k=8,
                touched=touched,
            )
            for name, (N, K) in _EXPERTS.items()
            for rows, touched in ((8, 51), (64, 126))
        ),
    ]
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): x, the weight and its scale, if any; for step 6 also experts and their
    number.

    x has as many columns as the result, if the weight has fewer: so a result can be the next call's
    x.
    """
    make = jax.ShapeDtypeStruct
    columns = max(spec.inputs, spec.outputs)
    if spec.step == "6_grouped":
        weight = weight_of("fp8", spec.experts, spec.outputs, spec.inputs)
        plan = make((spec.touched,), jnp.int32), make((1,), jnp.int32)
        args = make((spec.touched * TOKENS, columns), jnp.bfloat16), *weight, *plan
    else:
        weight = weight_of("bf16" if spec.step < "5" else "fp8", spec.outputs, spec.inputs)
        args = make((spec.rows, columns), jnp.bfloat16), *weight
    return functools.partial(_run, spec.step), args


def _run(step: Step, *args: jax.Array) -> jax.Array:
    launch = dispatch.resolve("ladder", "mosaic_gpu", chips=CHIPS)
    if launch is None:
        product = reference.grouped if step == "6_grouped" else reference.product
    else:  # a slow import
        module = importlib.import_module(f"lab.lesson.mosaic_{step}")
        product = functools.partial(module.product, launch=launch)
    return product(*args, tokens=TOKENS) if step == "6_grouped" else product(*args)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`. Results have about the size of x, so that calls can be
    chained."""
    shapes = build(spec)[1]
    keys = jax.random.split(key, len(shapes))
    x, values = (random_leaf(shape, one) for shape, one in zip(shapes[:2], keys, strict=False))
    shrink = spec.inputs**-0.5
    if len(shapes) == 2:
        return x, (values * shrink).astype(values.dtype)
    scale = shrink * jax.random.uniform(keys[2], shapes[2].shape, minval=0.5, maxval=1.5)
    if spec.step != "6_grouped":
        return x, values, scale
    work = make_worklist(routing(spec, keys[3]), spec.experts, TOKENS, shared=False)
    return x, values, scale, work.experts[: spec.touched], work.num_items


def routing(spec: Spec, key: jax.Array) -> jax.Array:
    """Experts of each row, int32 [top_k, rows]: `touched` different ones, distinct within a row."""
    experts = jax.random.permutation(key, spec.experts)[: spec.touched]
    chosen = experts[jnp.arange(spec.rows * spec.top_k) % spec.touched]
    return chosen.reshape(spec.rows, spec.top_k).T.astype(jnp.int32)


def bytes(spec: Spec) -> float:
    return spec.bytes
