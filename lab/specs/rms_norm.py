"""RMSNorm workloads of supported models, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import api

EPS = 1e-6

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows; `parts` terms are added first, 0 for none.

    Parts are float32 partial sums of a product, which may have a bias, or bfloat16 results of
    experts if `weighted`. Their sum is normed before it is added if `inner`; what it makes of h is
    multiplied if `factor`. The norm is stored in `out`: float16 for products with fp8 weights in
    tiles, bfloat16 for a router and plain weights.
    """

    rows: int
    width: int
    parts: int = 0
    weighted: bool = False
    bias: bool = False
    inner: bool = False
    factor: bool = False
    out: tuple[str, ...] = ("bfloat16",)


HALF, BOTH = ("float16",), ("bfloat16", "float16")

SPECS = {
    "qwen3-moe-first": Spec(rows=8, width=2048, out=HALF),
    "qwen3-moe-attention": Spec(rows=8, width=2048, parts=4, out=BOTH),
    **{
        f"qwen3-moe-attention-{R}": Spec(rows=R, width=2048, parts=parts, out=BOTH)
        for R, parts in ((64, 4), (256, 1), (1024, 1))
    },
    "qwen3-moe-experts": Spec(rows=8, width=2048, parts=8, weighted=True, out=HALF),
    "qwen3-moe-experts-256": Spec(rows=256, width=2048, parts=8, weighted=True, out=HALF),
    "qwen3-moe-experts-1024": Spec(rows=1024, width=2048, parts=8, weighted=True, out=HALF),
    "qwen3-moe-experts-4096": Spec(rows=4096, width=2048, parts=8, weighted=True, out=HALF),
    "qwen3-moe-prefill": Spec(rows=4096, width=2048, parts=1, out=BOTH),
    "gpt-oss-first": Spec(rows=8, width=2880),
    "gpt-oss-attention": Spec(rows=8, width=2880, parts=4, bias=True),
    "gpt-oss-attention-256": Spec(rows=256, width=2880, parts=1, bias=True),
    "gpt-oss-experts": Spec(rows=8, width=2880, parts=4, weighted=True),
    "gpt-oss-prefill": Spec(rows=4096, width=2880, parts=1),
    "llama-8b-first": Spec(rows=8, width=4096),
    "llama-8b-mlp": Spec(rows=64, width=4096, parts=7),
    "gemma-31b-mlp": Spec(rows=8, width=5376, parts=6),
    **{
        f"gemma-31b-normed-attention-{R}": Spec(
            rows=R, width=5376, parts=parts, inner=True, out=HALF
        )
        for R, parts in ((8, 3), (64, 7), (256, 3))
    },
    **{
        f"gemma-31b-normed-mlp-{R}": Spec(
            rows=R, width=5376, parts=parts, inner=True, factor=True, out=HALF
        )
        for R, parts in ((8, 3), (64, 7), (256, 3), (4096, 1))
    },
    "widest": Spec(rows=8, width=8192, parts=16),
    "narrowest": Spec(rows=256, width=256),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of h[, parts], scale[, weights, rows][,
    bias][, inner scale][, factor]."""
    R, D, num_parts = spec.rows, spec.width, spec.parts
    h = jax.ShapeDtypeStruct((R, D), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((D,), jnp.bfloat16)
    if not num_parts:
        norm = partial(api.rms_norm, eps=EPS, out_dtype=spec.out[0], implementation="mosaic_gpu")
        return norm, (h, scale)
    add_norm = partial(api.add_rms_norm, eps=EPS, out_dtypes=spec.out, implementation="mosaic_gpu")
    if spec.weighted:
        buffer = jax.ShapeDtypeStruct((num_parts * R, D), jnp.bfloat16)
        shares = jax.ShapeDtypeStruct((num_parts, R), jnp.float32)
        sources = jax.ShapeDtypeStruct((num_parts, R), jnp.int32)
        add = lambda h, buffer, scale, weights, rows: add_norm(
            h, buffer, scale, routed=(weights, rows)
        )
        return add, (h, buffer, scale, shares, sources)
    parts = jax.ShapeDtypeStruct((num_parts, R, D), jnp.float32)
    others = [scale] * (spec.bias + spec.inner)
    others += [jax.ShapeDtypeStruct((1,), jnp.bfloat16)] if spec.factor else []

    def add(h, parts, scale, *others):
        others = list(others)
        bias = others.pop(0) if spec.bias else None
        inner = (others.pop(0), EPS) if spec.inner else None
        factor = others.pop(0) if spec.factor else None
        return add_norm(h, parts, scale, bias=bias, inner=inner, factor=factor)

    return add, (h, parts, scale, *others)


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; each row of the buffer is one part of one row.

    Values grow along a row, so that exchanged sums of squares of two strips change the result.
    """
    shapes = build(spec)[1]
    grown = lambda x: 1 + 3 * jnp.arange(x.shape[-1]) / x.shape[-1]
    arrays = [
        (grown(x) * jax.random.normal(jax.random.fold_in(key, i), x.shape)).astype(x.dtype)
        for i, x in enumerate(shapes)
    ]
    if spec.weighted:
        arrays[-1] = jax.random.permutation(key, spec.parts * spec.rows).reshape(shapes[-1].shape)
    return tuple(arrays)
