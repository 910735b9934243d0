"""Sum, bias, norms, rope and cache write as one kernel, for Hopper and Blackwell, in place on the cache.

A thread block takes one row and up to four heads of one kind (q, k or v), a warp to a head, so that
eight rows of a model keep many multiprocessors busy. A head lies in registers as its two halves, which
makes rope elementwise, and its norm a sum over the lanes of a warp. A block of k also reads v beside it,
whose numbers that are not finite it marks in k. Heads and halves are read straight
from memory: eight rows are a matter of latency, not of bytes. How a head is computed follows from the
head dim alone, so its bits do not depend on the rows and heads beside it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch
from pallas_kernels.kv_write.reference import stored

_WARPS = 4
_LANES = 32


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    B: int
    T: int
    N: int
    K: int
    H: int
    Z: int
    W: int
    S: int
    eps: float
    has_norms: bool
    has_bias: bool
    shared_kv: bool
    value_norm: bool
    ring: bool

    @property
    def heads(self) -> int:
        """Heads of one thread block; they are all of q, of k or of v."""
        return math.gcd(self.N, self.K, _WARPS)

    @property
    def half(self) -> int:
        return self.H // 2

    @property
    def layout(self):
        """Of one half of the block's heads: a head to a warp, or to several that do the same."""
        vector = min(4, self.half // _LANES)
        tiling = plgpu.Tiling(((self.heads, _LANES * vector), (vector,)))
        copies = _WARPS // self.heads
        warps = (-3,) if copies == 1 else (-3, plgpu.Replicated(copies))
        if self.heads == 1:
            warps = (plgpu.Replicated(copies),)
        return plgpu.Layout.TILED(tiling, warps, (-2,), -1)


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
    plan = _Plan(
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
def _kernel(plan: _Plan, interpret):
    """(parts, cos, sin, table, positions[, q_norm, k_norm][, bias], k_pages, v_pages) -> q."""
    G, layout = plan.heads, plan.layout
    halves = [pl.ds(0, plan.half), pl.ds(plan.half, plan.half)]

    def body(parts, cos, sin, table, positions, *rest):
        norms, rest = (rest[:2], rest[2:]) if plan.has_norms else ((None, None), rest)
        bias, rest = (rest[0], rest[1:]) if plan.has_bias else (None, rest)
        k_pages, v_pages, q = rest
        b, t, block = (lax.axis_index(name) for name in ("batch", "row", "block"))
        first = block * G  # head, of all that the projection holds

        def row_of(ref, *index):
            """[half] numbers that all heads share, as float32 [G, half]."""
            x = plgpu.load(ref.at[index], layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(x.astype(jnp.float32), (G, plan.half), (1,))

        def projected(first):
            """The two halves of the heads from `first` on, rounded."""
            both = []
            for half in halves:
                here = (pl.ds(first, G), half)
                load = lambda ref: plgpu.load(ref, layout=layout, optimized=False).astype(
                    jnp.float32
                )
                total = load(parts.at[(0, b, t, *here)])
                for s in range(1, plan.S):
                    total = total + load(parts.at[(s, b, t, *here)])
                if plan.has_bias:
                    total = total + load(bias.at[here])
                both.append(_round(total))
            return both

        def normed(both, weight):
            squares = (both[0] * both[0] + both[1] * both[1]).sum(1)
            inverse = lax.rsqrt(squares / plan.H + plan.eps)
            inverse = lax.broadcast_in_dim(inverse, (G, plan.half), (0,))
            both = [x * inverse for x in both]
            if weight is not None:
                both = [x * row_of(weight, half) for x, half in zip(both, halves, strict=True)]
            return [_round(x) for x in both]

        def rotated(both):
            c, s = row_of(cos, b, t), row_of(sin, b, t)
            return [both[0] * c - both[1] * s, both[1] * c + both[0] * s]

        def store(ref, index, both):
            for half, x in zip(halves, both, strict=True):
                x = x if ref.dtype == jnp.bfloat16 else _round(x)
                ref[(*index, half)] = stored(x, ref.dtype)

        def destination():
            """Page and slot of the row, and whether it has one."""
            position = positions[b, t]
            column = lax.div(position, plan.Z)
            column = lax.rem(column, plan.W) if plan.ring else column
            page = table[b, jnp.minimum(column, plan.W - 1)]
            # Page 0 of a table that is no ring is there to be written to in vain.
            real = True if plan.ring else (column < plan.W) & (page != 0)
            return page, lax.rem(position, plan.Z), real

        def write(pages, to, head, both):
            page, slot, real = to
            pl.when(real)(lambda: store(pages, (page, slot, pl.ds(head, G)), both))

        @pl.when(first < plan.N)
        def _():
            x = projected(first)
            x = normed(x, norms[0]) if plan.has_norms else x
            store(q, (b, t, pl.ds(first, G)), rotated(x))

        @pl.when((first >= plan.N) & (first < plan.N + plan.K))
        def _():
            to, raw = destination(), projected(first)
            value = raw if plan.shared_kv else projected(first + plan.K)
            x = normed(raw, norms[1]) if plan.has_norms else raw
            marked = zip(value, rotated(x), strict=True)
            write(k_pages, to, first - plan.N, [_select(v, k, jnp.nan) for v, k in marked])
            if plan.shared_kv:
                value = normed(raw, None) if plan.value_norm else raw
                write(v_pages, to, first - plan.N, [_select(v, v, 0.0) for v in value])

        if not plan.shared_kv:

            @pl.when(first >= plan.N + plan.K)
            def _():
                to, x = destination(), projected(first)
                x = normed(x, None) if plan.value_norm else x
                write(v_pages, to, first - plan.N - plan.K, [_select(v, v, 0.0) for v in x])

    num_heads = plan.N + (1 if plan.shared_kv else 2) * plan.K
    return jax.jit(
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((plan.B, plan.T, plan.N, plan.H), jnp.bfloat16),
            grid=(plan.B, plan.T, num_heads // G),
            grid_names=("batch", "row", "block"),
            # Nothing lies in shared memory, and nothing is both read and written.
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
    """To bfloat16 and back, as between two layers."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
