"""Attention workloads of supported models, for compile tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.verify_attention import api

MMA = {90: "wgmma", 100: "tcgen05.mma"}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """bfloat16 rows over a cache of `length` positions per sequence.

    With a window the page table is a ring. With `fp8` the cache is e4m3.
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int = 4096
    page_size: int = 16
    window: int | None = None
    sinks: bool = False
    fp8: bool = False

    @property
    def form(self) -> tuple[bool, int] | None:
        """Forms of many queries whose code differs, so that `lab.deviceless` compiles one of
        each."""
        return (self.fp8, self.head_dim) if self.rows >= 512 else None


QWEN3 = dict(heads=32, kv_heads=4, head_dim=128)
LLAMA = dict(heads=32, kv_heads=8, head_dim=128)
# Seven query heads per kv head do not fill a swizzle tile of eight rows.
QWEN2_SMALL = dict(heads=14, kv_heads=2, head_dim=64)
QWEN2 = dict(heads=28, kv_heads=4, head_dim=128)
GPT_OSS = dict(heads=64, kv_heads=8, head_dim=64, sinks=True)
GPT_OSS_LOCAL = dict(**GPT_OSS, window=128, length=768)
GEMMA_LOCAL = dict(heads=32, kv_heads=16, head_dim=256, window=1024, length=1536)
GEMMA_GLOBAL = dict(heads=32, kv_heads=4, head_dim=512)

# Long contexts: sequences, and keys of each.
LONG = {
    "one-16k": (1, 16384),
    "eight-16k": (8, 16384),
    "one-64k": (1, 65536),
    "one-128k": (1, 131072),
}

PREFILLS = {
    "512": (1, 512, 512),
    "512-eight": (8, 512, 512),
    "512-of-4k": (1, 512, 4096),
    "512-of-16k": (1, 512, 16384),
    "1k": (1, 1024, 1024),
    "2k": (1, 2048, 2048),
    "16k-begin": (1, 4096, 4096),
    "16k-end": (1, 4096, 16384),
}
"""Prefill calls: sequences, rows of each, and keys that the last row sees."""

SPECS = {
    "qwen3-moe-one": Spec(batch=1, rows=8, **QWEN3),
    "qwen3-moe-eight": Spec(batch=8, rows=8, **QWEN3),
    "qwen3-moe-batch-32": Spec(batch=32, rows=8, **QWEN3),
    "qwen3-moe-batch-128": Spec(batch=128, rows=8, **QWEN3),
    "qwen3-moe-many": Spec(batch=64, rows=8, **QWEN3),
    "qwen3-moe-plain": Spec(batch=8, rows=1, **QWEN3),
    "qwen3-moe-draft": Spec(batch=8, rows=14, **QWEN3),
    "qwen3-moe-prefill": Spec(batch=1, rows=512, **QWEN3),
    "qwen3-moe-long": Spec(batch=1, rows=8, length=32768, page_size=64, **QWEN3),
    "qwen3-moe-long-eight": Spec(batch=8, rows=8, length=16384, page_size=64, **QWEN3),
    "llama-8b-one": Spec(batch=1, rows=8, **LLAMA),
    "llama-8b-eight": Spec(batch=8, rows=8, page_size=32, **LLAMA),
    "llama-8b-many": Spec(batch=64, rows=6, **LLAMA),
    "llama-8b-prefill": Spec(batch=1, rows=512, **LLAMA),
    "qwen2.5-0.5b-eight": Spec(batch=8, rows=8, **QWEN2_SMALL),
    "qwen2.5-7b-one": Spec(batch=1, rows=8, **QWEN2),
    "gpt-oss-one": Spec(batch=1, rows=8, **GPT_OSS),
    "gpt-oss-eight": Spec(batch=8, rows=8, **GPT_OSS),
    "gpt-oss-many": Spec(batch=64, rows=8, **GPT_OSS),
    "gpt-oss-prefill": Spec(batch=1, rows=512, **GPT_OSS),
    "gpt-oss-local-one": Spec(batch=1, rows=8, **GPT_OSS_LOCAL),
    "gpt-oss-local-eight": Spec(batch=8, rows=8, **GPT_OSS_LOCAL),
    "gpt-oss-local-prefill": Spec(batch=1, rows=512, **GPT_OSS_LOCAL),
    "gemma-31b-local-one": Spec(batch=1, rows=8, **GEMMA_LOCAL),
    "gemma-31b-local-many": Spec(batch=64, rows=8, **GEMMA_LOCAL),
    "gemma-31b-local-prefill": Spec(batch=1, rows=512, **GEMMA_LOCAL),
    "gemma-31b-global-one": Spec(batch=1, rows=8, **GEMMA_GLOBAL),
    "gemma-31b-global-many": Spec(batch=64, rows=8, **GEMMA_GLOBAL),
    "gemma-31b-global-prefill": Spec(batch=1, rows=512, **GEMMA_GLOBAL),
    "qwen3-moe-fp8-cache": Spec(batch=8, rows=8, fp8=True, **QWEN3),
    "qwen3-moe-fp8-cache-many": Spec(batch=64, rows=8, fp8=True, **QWEN3),
    "llama-8b-fp8-cache": Spec(batch=64, rows=6, fp8=True, **LLAMA),
    "gpt-oss-fp8-cache": Spec(batch=64, rows=8, fp8=True, **GPT_OSS),
    "gpt-oss-local-fp8-cache": Spec(batch=8, rows=8, fp8=True, **GPT_OSS_LOCAL),
    "gemma-31b-local-fp8-cache": Spec(batch=64, rows=8, fp8=True, **GEMMA_LOCAL),
    "gemma-31b-global-fp8-cache": Spec(batch=64, rows=8, fp8=True, **GEMMA_GLOBAL),
    **{
        f"long-{name}{'-fp8-cache' * fp8}": Spec(
            batch=batch, rows=8, length=length, page_size=64, fp8=fp8, **QWEN3
        )
        for name, (batch, length) in LONG.items()
        for fp8 in (False, True)
    },
    "long-eight-16k-plain": Spec(batch=8, rows=1, length=16384, page_size=64, **QWEN3),
    "gemma-31b-global-long": Spec(batch=8, rows=8, length=16384, **GEMMA_GLOBAL),
    "gpt-oss-prefill-long": Spec(batch=1, rows=512, length=16384, **GPT_OSS),
    **{
        f"prefill-{model}-{name}": Spec(
            batch=batch, rows=rows, length=length, page_size=64, **sizes
        )
        for model, sizes in (("qwen3-moe", QWEN3), ("llama-8b", LLAMA), ("gpt-oss", GPT_OSS))
        for name, (batch, rows, length) in PREFILLS.items()
    },
    "prefill-gpt-oss-local-16k": Spec(
        batch=1, rows=4096, page_size=64, **GPT_OSS_LOCAL | dict(length=4224)
    ),
    **{
        f"prefill-{model}-16k-end-fp8-cache": Spec(
            batch=1, rows=4096, length=16384, page_size=64, fp8=True, **sizes
        )
        for model, sizes in (("qwen3-moe", QWEN3), ("llama-8b", LLAMA), ("gpt-oss", GPT_OSS))
    },
    "embedded": Spec(batch=2, rows=4, heads=4, kv_heads=2, head_dim=64, length=512),
}


def build(spec: Spec) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """(function, args): the kernel, and shapes of q, k_pages, v_pages, page table,
    positions[, sinks]."""
    B, T, N, K, H = spec.batch, spec.rows, spec.heads, spec.kv_heads, spec.head_dim
    W = spec.length // spec.page_size
    kept = jnp.float8_e4m3fn if spec.fp8 else jnp.bfloat16
    pages = jax.ShapeDtypeStruct((B * W + 1, spec.page_size, K, H), kept)
    args = (
        jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16),
        pages,
        pages,
        jax.ShapeDtypeStruct((B, W), jnp.int32),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )
    if spec.sinks:
        args = (*args, jax.ShapeDtypeStruct((N,), jnp.bfloat16))

    def run(q, k_pages, v_pages, page_table, positions, sinks=None):
        return api.verify_attention(
            q,
            k_pages,
            v_pages,
            page_table=page_table,
            positions=positions,
            scale=H**-0.5,
            window=spec.window,
            sinks=sinks,
            implementation="mosaic_gpu",
        )

    return run, args


def inputs(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random arguments for `build`; the new rows are the last positions of a full cache."""
    return on_full_cache(build(spec)[1], 3, spec.length, key)


def on_full_cache(shapes: tuple, table: int, length: int, key: jax.Array) -> tuple[jax.Array, ...]:
    """Normal random arrays, except arguments `table` (page table [B, W] without shared pages) and
    `table + 1` (positions [B, T], the last ones of `length`)."""
    keys = jax.random.split(key, len(shapes))
    arrays = [
        jax.random.normal(k, x.shape).astype(x.dtype) for x, k in zip(shapes, keys, strict=True)
    ]
    pages, positions = shapes[table : table + 2]
    last = jnp.arange(length - positions.shape[1], length, dtype=positions.dtype)
    arrays[table] = 1 + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
    arrays[table + 1] = jnp.broadcast_to(last, positions.shape)
    return tuple(arrays)


def bytes(spec: Spec) -> int:
    """Minimum memory traffic: q, the result, and the visible keys and values."""
    rows = 2 * 2 * spec.batch * spec.rows * spec.heads * spec.head_dim
    seen = spec.length
    if spec.window is not None:
        seen = min(seen, spec.window + spec.rows - 1)
    keys = 2 * spec.batch * seen * spec.kv_heads * spec.head_dim
    return rows + keys * (1 if spec.fp8 else 2)
