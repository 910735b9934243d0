"""Kernel from the q/k/v projection to attention: sum, bias, norms, RoPE, and in-place cache write.

One source for Hopper and Blackwell. A thread block handles one row and up to four heads of one kind
(q, k or v), one warp per head, so that a small batch uses many SMs. A head is in registers as two
halves: RoPE is elementwise and the norm is a reduction over the lanes of one warp. A k block also
computes v, to mark its non-finite elements in k. Everything is loaded straight to registers,
because small batches are bound by latency. The computation of a head depends on the head dim only,
so its bits do not depend on other rows and heads.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import rounded
from pallas_kernels.dispatch import Launch
from pallas_kernels.rope_write.reference import Form
from pallas_kernels.rounded_product import rounded_product

_WARPS = 4
_LANES = 32


@dataclasses.dataclass(frozen=True)
class _HeadPlan:
    """Static facts of one call."""

    B: int  # sequences
    T: int  # rows per sequence
    N: int  # query heads
    K: int  # kv heads
    H: int  # head dim
    Z: int  # tokens per page
    W: int  # pages per sequence
    parts: int  # partial sums of the projection
    eps: float
    has_norms: bool
    has_bias: bool
    shared_kv: bool
    value_norm: bool
    ring: bool

    @property
    def heads(self) -> int:
        """Heads per thread block, all of one kind."""
        return math.gcd(self.N, self.K, _WARPS)

    @property
    def half(self) -> int:
        return self.H // 2

    @property
    def layout(self):
        """Register layout [heads, half]: one head per warp; warps are replicated below four
        heads."""
        vector = min(4, self.half // _LANES)
        tiling = plgpu.Tiling(((self.heads, _LANES * vector), (vector,)))
        copies = _WARPS // self.heads
        warps = (-3,) if copies == 1 else (-3, plgpu.Replicated(copies))
        if self.heads == 1:
            warps = (plgpu.Replicated(copies),)
        return plgpu.Layout.TILED(tiling, warps, (-2,), -1)


def rope_write(
    qkv: jax.Array,  # [B, T, width] or [parts, B, T, width]
    k_pages: jax.Array,  # [P, Z, K, H]
    v_pages: jax.Array,  # [P, Z, K, H]
    angles: tuple[jax.Array, jax.Array],  # each [B, T, H / 2]
    page_table: jax.Array,  # [B, W]
    positions: jax.Array,  # [B, T]
    form: Form,
    norms: tuple[jax.Array, jax.Array] | None,  # of q and of k, each [H]
    bias: jax.Array | None,  # [width]
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, Z, K, H = k_pages.shape
    parts = qkv.reshape(-1, *qkv.shape[-3:-1], qkv.shape[-1] // H, H)
    num_parts, B, T = parts.shape[:3]
    plan = _HeadPlan(
        B=B,
        T=T,
        N=form.num_heads,
        K=K,
        H=H,
        Z=Z,
        W=page_table.shape[1],
        parts=num_parts,
        eps=form.eps,
        has_norms=norms is not None,
        has_bias=bias is not None,
        shared_kv=form.shared_kv,
        value_norm=form.value_norm,
        ring=form.ring,
    )
    operands = [parts, *(x.astype(jnp.float32) for x in angles)]
    operands += [x.astype(jnp.int32) for x in (page_table, positions)]
    operands += norms or ()
    operands += [bias.reshape(-1, H)] if plan.has_bias else ()
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    q = _kernel(plan, launch.interpret)(*operands, k_ref, v_ref)
    return q, k_ref[...], v_ref[...]


@functools.cache
def _kernel(plan: _HeadPlan, interpret):
    """(parts, cos, sin, table, positions[, q_norm, k_norm][, bias], k_pages, v_pages) -> q."""
    G, layout = plan.heads, plan.layout
    halves = [pl.ds(0, plan.half), pl.ds(plan.half, plan.half)]

    def body(
        parts_gmem,  # [parts, B, T, heads of the projection, H] float32 or bfloat16
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

        def times(x, y):
            """The rounded product. The compiler would fuse one of two products with their sum;
            which one depends on the number of parts."""
            return rounded_product(x, y, layout, interpret)

        def load_row(row_gmem, *index):
            """Loads a vector [half] shared by all heads, as float32 [G, half]."""
            x = plgpu.load(row_gmem.at[index], layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(x.astype(jnp.float32), (G, plan.half), (1,))

        def project(first):
            """Sum of the parts plus bias, rounded, of G heads from `first` on: two halves
            [G, half]."""
            halves_reg = []
            for half in halves:
                index = (pl.ds(first, G), half)
                load = lambda heads_gmem: plgpu.load(
                    heads_gmem, layout=layout, optimized=False
                ).astype(jnp.float32)
                total = load(parts_gmem.at[(0, b, t, *index)])
                for s in range(1, plan.parts):
                    total = total + load(parts_gmem.at[(s, b, t, *index)])
                if plan.has_bias:
                    total = total + load(bias_gmem.at[index])
                halves_reg.append(_round(total))
            return halves_reg

        def normalize(halves_reg, weight_gmem):
            low, high = (times(x, x) for x in halves_reg)
            squares = (low + high).sum(1)
            inverse = lax.rsqrt(squares / plan.H + plan.eps)
            inverse = lax.broadcast_in_dim(inverse, (G, plan.half), (0,))
            halves_reg = [x * inverse for x in halves_reg]
            if weight_gmem is not None:
                halves_reg = [
                    x * load_row(weight_gmem, half)
                    for x, half in zip(halves_reg, halves, strict=True)
                ]
            return [_round(x) for x in halves_reg]

        def rotate(halves_reg):
            c, s = load_row(cos_gmem, b, t), load_row(sin_gmem, b, t)
            low, high = halves_reg
            return [times(low, c) - times(high, s), times(high, c) + times(low, s)]

        def store(out_gmem, index, halves_reg):
            for half, x in zip(halves, halves_reg, strict=True):
                x = x if out_gmem.dtype == jnp.bfloat16 else _round(x)
                out_gmem[(*index, half)] = rounded(x, out_gmem.dtype)

        def locate():
            """(page, slot in the page, whether the row is stored)."""
            position = positions_gmem[b, t]
            column = lax.div(position, plan.Z)
            column = lax.rem(column, plan.W) if plan.ring else column
            page = table_gmem[b, jnp.minimum(column, plan.W - 1)]
            # Without a ring, page 0 is a dummy page: rows without a page skip the store.
            real = True if plan.ring else (column < plan.W) & (page != 0)
            return page, lax.rem(position, plan.Z), real

        def write(pages_gmem, place, head, halves_reg):
            page, slot, real = place
            pl.when(real)(lambda: store(pages_gmem, (page, slot, pl.ds(head, G)), halves_reg))

        @pl.when(first < plan.N)
        def _():
            x = project(first)
            x = normalize(x, norms_gmem[0]) if plan.has_norms else x
            store(q_gmem, (b, t, pl.ds(first, G)), rotate(x))

        @pl.when((first >= plan.N) & (first < plan.N + plan.K))
        def _():
            place, raw = locate(), project(first)
            value = raw if plan.shared_kv else project(first + plan.K)
            x = normalize(raw, norms_gmem[1]) if plan.has_norms else raw
            marked = zip(value, rotate(x), strict=True)
            write(k_pages_gmem, place, first - plan.N, [_select(v, k, jnp.nan) for v, k in marked])
            if plan.shared_kv:
                value = normalize(raw, None) if plan.value_norm else raw
                write(v_pages_gmem, place, first - plan.N, [_select(v, v, 0.0) for v in value])

        if not plan.shared_kv:

            @pl.when(first >= plan.N + plan.K)
            def _():
                place, x = locate(), project(first)
                x = normalize(x, None) if plan.value_norm else x
                write(v_pages_gmem, place, first - plan.N - plan.K, [_select(v, v, 0.0) for v in x])

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


def _select(v: jax.Array, x: jax.Array, otherwise: float) -> jax.Array:
    """x where v is finite, `otherwise` elsewhere."""
    return jnp.where(jnp.abs(v) < jnp.inf, x, otherwise)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bfloat16 and back, as separate layers would."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
