"""Workloads of `rope_write` in supported models, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lab.specs.verify_attention import on_full_cache
from pallas_kernels.rope_write import api

MMA: dict[int, str] = {}
"""No matrix instruction on any chip."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """New rows for a cache of `length` positions per sequence; `parts` float32 terms, or 0 for
    bfloat16."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    parts: int = 0
    qk_norm: bool = False
    bias: bool = False
    shared_kv: bool = False
    value_norm: bool = False
    ring: bool = False
    length: int = 4096
    page_size: int = 16
    fp8: bool = False

    @property
    def form(self) -> api.Form:
        return api.Form(
            num_heads=self.heads,
            shared_kv=self.shared_kv,
            value_norm=self.value_norm,
            ring=self.ring,
            dtype=jnp.dtype(jnp.bfloat16),
        )


QWEN3 = dict(heads=32, kv_heads=4, head_dim=128, qk_norm=True)
LLAMA = dict(heads=32, kv_heads=8, head_dim=128)
GPT_OSS = dict(heads=64, kv_heads=8, head_dim=64, bias=True)
GEMMA = dict(heads=32, qk_norm=True, value_norm=True)
GEMMA_LOCAL = dict(**GEMMA, kv_heads=16, head_dim=256, ring=True, length=1536)
GEMMA_GLOBAL = dict(**GEMMA, kv_heads=4, head_dim=512, shared_kv=True)

SPECS = {
    "qwen3-moe-one": Spec(batch=1, rows=8, parts=4, **QWEN3),
    "qwen3-moe-eight": Spec(batch=8, rows=8, parts=2, **QWEN3),
    "qwen3-moe-batch-32": Spec(batch=32, rows=8, **QWEN3),
    "qwen3-moe-batch-128": Spec(batch=128, rows=8, **QWEN3),
    "qwen3-moe-whole": Spec(batch=8, rows=8, **QWEN3),
    "qwen3-moe-prefill": Spec(batch=1, rows=512, **QWEN3),
    "llama-8b-one": Spec(batch=1, rows=8, parts=4, **LLAMA),
    "llama-8b-many": Spec(batch=64, rows=6, page_size=32, **LLAMA),
    "gpt-oss-one": Spec(batch=1, rows=8, parts=4, **GPT_OSS),
    "gpt-oss-local": Spec(batch=8, rows=8, parts=2, ring=True, length=768, **GPT_OSS),
    "gpt-oss-prefill": Spec(batch=1, rows=512, **GPT_OSS),
    "gemma-31b-local": Spec(batch=8, rows=8, parts=4, **GEMMA_LOCAL),
    "gemma-31b-global": Spec(batch=8, rows=8, parts=4, **GEMMA_GLOBAL),
    "qwen3-moe-fp8-cache": Spec(batch=8, rows=8, parts=2, fp8=True, **QWEN3),
    "gpt-oss-fp8-cache": Spec(batch=8, rows=8, parts=2, fp8=True, **GPT_OSS),
    "gemma-31b-local-fp8-cache": Spec(batch=8, rows=8, parts=4, fp8=True, **GEMMA_LOCAL),
    "gemma-31b-global-fp8-cache": Spec(batch=8, rows=8, parts=4, fp8=True, **GEMMA_GLOBAL),
    "embedded": Spec(batch=2, rows=4, heads=4, kv_heads=2, head_dim=64, length=512, qk_norm=True),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of qkv, k_pages, v_pages, cos, sin, page table,
    positions[, q norm, k norm][, bias]. Donated pages are updated in place."""
    B, T, K, H = spec.batch, spec.rows, spec.kv_heads, spec.head_dim
    W, width = spec.length // spec.page_size, spec.form.width(K, H)
    shaped = jax.ShapeDtypeStruct
    pages = shaped(
        (B * W + 1, spec.page_size, K, H), jnp.float8_e4m3fn if spec.fp8 else jnp.bfloat16
    )
    args = (
        shaped((spec.parts, B, T, width), jnp.float32)
        if spec.parts
        else shaped((B, T, width), jnp.bfloat16),
        pages,
        pages,
        shaped((B, T, H // 2), jnp.float32),
        shaped((B, T, H // 2), jnp.float32),
        shaped((B, W), jnp.int32),
        shaped((B, T), jnp.int32),
        *(2 * [shaped((H,), jnp.bfloat16)] if spec.qk_norm else []),
        *([shaped((width,), jnp.bfloat16)] if spec.bias else []),
    )

    def run(qkv, k_pages, v_pages, cos, sin, page_table, positions, *weights):
        return api.rope_write(
            qkv,
            k_pages,
            v_pages,
            angles=(cos, sin),
            page_table=page_table,
            positions=positions,
            form=spec.form,
            norms=weights[:2] if spec.qk_norm else None,
            bias=weights[-1] if spec.bias else None,
            implementation="mosaic_gpu",
        )

    return run, args


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; the new rows are the last positions of a full cache."""
    return on_full_cache(build(spec)[1], 5, spec.length, key)


def bytes(spec: Spec) -> int:
    """Minimum memory traffic: parts, angles, q, and the written rows of keys and values."""
    rows, K, H = spec.batch * spec.rows, spec.kv_heads, spec.head_dim
    read = spec.form.width(K, H) * (4 * spec.parts or 2) + 4 * H
    return rows * (read + 2 * spec.heads * H + 2 * K * H * (1 if spec.fp8 else 2))
