"""Kernel from the q/k/v projection to attention: sum, bias, norms, RoPE, and in-place cache write.

One source for Hopper and Blackwell. A thread block handles one row and up to four heads of one kind (q, k or
v), one warp per head, so that a small batch uses many SMs. `mosaic_heads` has what happens to a head. A k block also
computes v, to mark its non-finite elements in k. Everything is loaded straight to registers, because small batches are
bound by latency.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.rope_write.mosaic_heads import Heads, Plan


def rope_write(
    qkv: jax.Array,  # [B, T, W] or parts [S, B, T, W]
    pages: tuple[jax.Array, jax.Array],  # each [P, Z, K, H]
    angles: tuple[jax.Array, jax.Array],  # each [B, T, H / 2]
    where: tuple[jax.Array, jax.Array, bool],  # page table [B, W], positions [B, T], ring
    num_heads: int,
    norms: tuple[jax.Array | None, jax.Array | None],  # of q and of k, each [H]
    eps: float,
    bias: jax.Array | None,  # [W]
    value: tuple[bool, bool],  # shared_kv, value_norm
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    table, positions, ring = where
    _, Z, K, H = pages[0].shape
    parts = qkv.reshape(-1, *qkv.shape[-3:-1], qkv.shape[-1] // H, H)
    S, B, T = parts.shape[:3]
    plan = Plan(
        B, T, num_heads, K, H, Z, table.shape[1], S, eps,
        norms[0] is not None, bias is not None, *value, ring,
    )  # fmt: skip
    operands = [parts, *(x.astype(jnp.float32) for x in angles)]
    operands += [x.astype(jnp.int32) for x in (table, positions)]
    operands += norms if plan.has_norms else ()
    operands += [bias.reshape(-1, H)] if plan.has_bias else ()
    k_ref, v_ref = (jax.new_ref(x) for x in pages)
    q = _kernel(plan, launch.interpret)(*operands, k_ref, v_ref)
    return q, k_ref[...], v_ref[...]


@functools.cache
def _kernel(plan: Plan, interpret):
    """(parts, cos, sin, table, positions[, q_norm, k_norm][, bias], k_pages, v_pages) -> q."""
    G = plan.heads
    heads = Heads(plan, G)

    def body(
        parts_gmem,  # [S, B, T, heads of the projection, H] float32 or bfloat16
        cos_gmem,  # [B, T, H / 2] float32
        sin_gmem,  # [B, T, H / 2] float32
        table_gmem,  # [B, W] int32
        positions_gmem,  # [B, T] int32
        *refs,  # q and k norm weights [H], if any; bias [heads, H], if any; then as below
    ):
        norms_gmem, refs = (refs[:2], refs[2:]) if plan.has_norms else ((None, None), refs)
        bias_gmem, refs = (refs[0], refs[1:]) if plan.has_bias else (None, refs)
        k_pages_gmem, v_pages_gmem, q_gmem = refs  # [P, Z, K, H] twice, bfloat16 [B, T, N, H]
        b, t, block = (lax.axis_index(name) for name in ("batch", "row", "block"))
        first = block * G  # first head of the block, among all heads of the projection

        def project(first):
            """Sum of the parts plus bias, rounded, of G heads from `first` on."""
            of_heads = pl.ds(first, G)
            parts = [
                lambda half, s=s: parts_gmem.at[s, b, t, of_heads, half] for s in range(plan.S)
            ]
            bias = (lambda half: bias_gmem.at[of_heads, half]) if plan.has_bias else None
            return heads.sums(parts, bias)

        def rotate(x):
            return heads.rotate(x, (heads.load_row(cos_gmem, b, t), heads.load_row(sin_gmem, b, t)))

        def locate():
            return heads.locate(b, t, table_gmem, positions_gmem)

        @pl.when(first < plan.N)
        def _():
            x = project(first)
            x = heads.normalize(x, norms_gmem[0]) if plan.has_norms else x
            heads.store(q_gmem, (b, t, pl.ds(first, G)), rotate(x))

        @pl.when((first >= plan.N) & (first < plan.N + plan.K))
        def _():
            place, raw = locate(), project(first)
            value = raw if plan.shared_kv else project(first + plan.K)
            x = heads.normalize(raw, norms_gmem[1]) if plan.has_norms else raw
            keys = heads.marked_keys(rotate(x), value)
            heads.write(k_pages_gmem, place, first - plan.N, keys)
            if plan.shared_kv:
                value = heads.normalize(raw, None) if plan.value_norm else raw
                heads.write(v_pages_gmem, place, first - plan.N, heads.finite_values(value))

        if not plan.shared_kv:

            @pl.when(first >= plan.N + plan.K)
            def _():
                place, x = locate(), project(first)
                x = heads.normalize(x, None) if plan.value_norm else x
                values = heads.finite_values(x)
                heads.write(v_pages_gmem, place, first - plan.N - plan.K, values)

    num_heads = plan.N + (1 if plan.shared_kv else 2) * plan.K
    return jax.jit(
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.H), jnp.bfloat16),
            grid=(plan.B, plan.T, num_heads // G),
            grid_names=("batch", "row", "block"),
            # Safe without barriers: no shared memory, and no ref is both read and written.
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
            interpret=interpret,
            kernel_name="rope_write",
        )
    )
