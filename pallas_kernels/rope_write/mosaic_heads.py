"""What kernels do with a head of a projection in registers: round, norm, rotate, and write it to the cache.

A head is two halves, because RoPE is elementwise on halves, and lies in one warp, so that the norm is a reduction over
the lanes of a warp. What becomes of a head depends on the head dim only, so its bits do not depend on other rows and
heads, nor on the kernel.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rope_write.reference import stored

WARPS = 4
_LANES = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one call."""

    B: int  # sequences
    T: int  # rows per sequence
    N: int  # query heads
    K: int  # kv heads
    H: int  # head dim
    Z: int  # tokens per page
    W: int  # pages per sequence
    S: int  # parts of the projection
    eps: float
    has_norms: bool
    has_bias: bool
    shared_kv: bool
    value_norm: bool
    ring: bool

    @property
    def heads(self) -> int:
        """Most heads of one kind that a warpgroup has, a warp each."""
        return math.gcd(self.N, self.K, WARPS)

    @property
    def half(self) -> int:
        return self.H // 2

    @property
    def halves(self) -> list:
        return [pl.ds(0, self.half), pl.ds(self.half, self.half)]


class Heads:
    """`count` heads of a plan in a warpgroup: a list of two halves, float32 [count, H / 2]."""

    def __init__(self, plan: Plan, count: int):
        self.plan, self.count = plan, count
        vector = min(4, plan.half // _LANES)
        tiling = plgpu.Tiling(((count, _LANES * vector), (vector,)))
        copies = WARPS // count  # below four heads each is in several warps
        warps = (-3,) if copies == 1 else (-3, plgpu.Replicated(copies))
        if count == 1:
            warps = (plgpu.Replicated(copies),)
        self.layout = plgpu.Layout.TILED(tiling, warps, (-2,), -1)

    def load(self, heads_ref: Any) -> jax.Array:
        """Loads [count, H / 2] as float32."""
        x = plgpu.load(heads_ref, layout=self.layout, optimized=False)
        return x.astype(jnp.float32)

    def load_row(self, row_gmem: Any, *index: Any) -> jax.Array:
        """Loads a vector [H / 2] shared by all heads, as float32 [count, H / 2]."""
        x = plgpu.load(row_gmem.at[index], layout=self.layout.reduce(0), optimized=False)
        shape = self.count, self.plan.half
        return lax.broadcast_in_dim(x.astype(jnp.float32), shape, (1,))

    def sums(self, parts: Sequence[Callable[[Any], Any]], bias: Callable | None) -> list:
        """Sum of the parts plus bias, rounded. Each is a function: half of the columns -> ref."""
        halves_reg = []
        for half in self.plan.halves:
            total = self.load(parts[0](half))
            for part in parts[1:]:
                total = total + self.load(part(half))
            if bias is not None:
                total = total + self.load(bias(half))
            halves_reg.append(_round(total))
        return halves_reg

    def normalize(self, halves_reg: list, weight_gmem: Any) -> list:
        """The norm of each head, times a weight [H] if there is one."""
        plan, shape = self.plan, (self.count, self.plan.half)
        squares = (halves_reg[0] * halves_reg[0] + halves_reg[1] * halves_reg[1]).sum(1)
        inverse = lax.rsqrt(squares / plan.H + plan.eps)
        inverse = lax.broadcast_in_dim(inverse, shape, (0,))
        halves_reg = [x * inverse for x in halves_reg]
        if weight_gmem is not None:
            halves_reg = [
                x * self.load_row(weight_gmem, half)
                for x, half in zip(halves_reg, plan.halves, strict=True)
            ]
        return [_round(x) for x in halves_reg]

    def rotate(self, halves_reg: list, cos_sin_reg: tuple[jax.Array, jax.Array]) -> list:
        c, s = cos_sin_reg
        return [halves_reg[0] * c - halves_reg[1] * s, halves_reg[1] * c + halves_reg[0] * s]

    def store(self, out_gmem: Any, index: tuple, halves_reg: list) -> None:
        for half, x in zip(self.plan.halves, halves_reg, strict=True):
            x = x if out_gmem.dtype == jnp.bfloat16 else _round(x)
            out_gmem[(*index, half)] = stored(x, out_gmem.dtype)

    def locate(self, b: Any, t: Any, table_gmem: Any, positions_gmem: Any) -> tuple[Any, Any, Any]:
        """Where row (b, t) is stored: (page, slot in the page, whether it is)."""
        plan = self.plan
        position = positions_gmem[b, t]
        column = lax.div(position, plan.Z)
        column = lax.rem(column, plan.W) if plan.ring else column
        page = table_gmem[b, jnp.minimum(column, plan.W - 1)]
        # Without a ring, page 0 is a dummy page: rows without a page skip the store.
        real = True if plan.ring else (column < plan.W) & (page != 0)
        return page, lax.rem(position, plan.Z), real

    def write(self, pages_gmem: Any, place: tuple, head: Any, halves_reg: list) -> None:
        """Stores kv heads from `head` on at a place of the cache."""
        page, slot, real = place
        index = page, slot, pl.ds(head, self.count)
        pl.when(real)(lambda: self.store(pages_gmem, index, halves_reg))

    def marked_keys(self, keys_reg: list, values_reg: list) -> list:
        """Keys, NaN where the value is not finite."""
        return [_select(v, k, jnp.nan) for v, k in zip(values_reg, keys_reg, strict=True)]

    def finite_values(self, values_reg: list) -> list:
        """Values, 0 where they are not finite."""
        return [_select(v, v, 0.0) for v in values_reg]


def _select(v: jax.Array, x: jax.Array, otherwise: float) -> jax.Array:
    """x where v is finite, `otherwise` elsewhere."""
    return jnp.where(jnp.abs(v) < jnp.inf, x, otherwise)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bfloat16 and back, as separate layers would."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)
