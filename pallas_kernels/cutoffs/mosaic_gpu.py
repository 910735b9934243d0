"""Kernel of the cutoffs of top-k and top-p, for Hopper and Blackwell: one cluster of thread blocks
per row.

A block reads its part of the row once. The bits of floats that are not negative are ordered as the
floats, so 16 passes over the part find a limit, two bits each: they add up the tokens, or their
mass, up to three limits.

Few logits are large. So of each four values of a thread the largest stays in a register (`few`),
and the others lie in shared memory (`rest`). A limit that is found among the few is exact unless
some of the rest is within it, which one comparison tells; only then are all searched:

    load      logits -> few, rest; the largest of both, in the cluster
    top-k     the limit among the few; among all if that was not enough
    mass      of few and of all tokens up to the limit
    top-p     the limit among the few, if their mass is enough for the goal; among all if not

A step that a row does not ask for is a loop of no turns. All blocks of a cluster take the same
turns: what decides is computed from numbers that all have, in the same order.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cutoffs import mosaic_exchange
from pallas_kernels.cutoffs.mosaic_exchange import (
    LANES,
    LAYOUT,
    MASSES,
    MAXIMA,
    PART,
    WARPS,
    Exchange,
)
from pallas_kernels.dispatch import Launch

_SHARE = 4
"""Values of a thread of which the largest is one of the few."""
_FEW = 4
"""Pieces of the few; the rest has three times as many. Larger pieces take more registers, and more
pieces longer to compile."""
_MOST = 160
"""Values of a thread, if more blocks could share the row."""
_PASSES, _BITS = 16, 2
_INFINITY = 0x7F800000
"""The bits of infinity."""
_LOG2_E = math.log2(math.e)


class _CutoffPlan(NamedTuple):
    """Sizes of one call.

    Attributes:
      columns: in units of 128, one for each thread of a block.
      blocks: of the cluster of a row.
      piece: values of a thread in a register array [piece, 4, 32].
    """

    columns: int
    blocks: int
    piece: int

    @classmethod
    def of(cls, V: int) -> "_CutoffPlan":
        columns = V // (WARPS * LANES)
        # With one block an H200 reports an illegal instruction: that is probably no cluster for
        # `st.async`.
        blocks = next(n for n in (2, 4, 8) if n == 8 or columns <= n * _MOST)
        return cls(columns, blocks, pl.cdiv(columns, blocks * _SHARE * _FEW))

    @property
    def few(self) -> int:
        """Values of a thread that are among the few."""
        return _FEW * self.piece

    @property
    def rest(self) -> int:
        """Pieces of the others."""
        return (_SHARE - 1) * _FEW

    @property
    def likely(self) -> int:
        """Most tokens of top-k that are searched among the few first. Among k random places of the
        row there are two with the same largest value with a probability of about 1.5 k**2 / V."""
        return math.isqrt(self.columns * WARPS * LANES) // 2


@functools.partial(jax.jit, static_argnames="launch")
def cutoffs(
    logits: jax.Array, scale: jax.Array, top_k: jax.Array, top_p: jax.Array, *, launch: Launch
) -> jax.Array:
    """As `api.cutoffs`: logits [R, V] float32 and rules [R] -> limits float32 [R]."""
    R, V = logits.shape
    plan = _CutoffPlan.of(V)
    exchanges = mosaic_exchange.memory(R, plan.blocks, launch)

    def body(logits_gmem, scale_gmem, top_k_gmem, top_p_gmem, limits_gmem, *refs, rest_smem, **own):
        r, block = lax.axis_index("row"), lax.axis_index("block")
        k, p = top_k_gmem[r], top_p_gmem[r]
        asks = (k > 0) | (p < 1.0)

        def store(limit):
            @pl.when(block == 0)
            def _():
                limits_gmem[r] = limit

        @pl.when(asks)
        def _():
            exchange = Exchange(plan.blocks, r, block, *refs, **own)
            exchange.begin()
            row = _load(plan, logits_gmem.at[r], scale_gmem[r], block, rest_smem, exchange)
            limit = _top_k(row, k, plan.likely)
            store(_float(jnp.minimum(limit, _top_p(row, p, limit))))

        @pl.when(~asks)
        def _():
            store(_float(_each(_INFINITY)))

    outputs = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((R, WARPS), jnp.float32), *exchanges.out),
        scratch_types=dict(
            rest_smem=plgpu.SMEM((plan.rest, plan.piece, WARPS, LANES), jnp.float32),
            **exchanges.scratch,
        ),
        # Safe: a thread reads what another one wrote in `Exchange` and in `_any` only, behind their
        # barriers.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=64, approx_math=True
        ),
        grid=(R,),
        grid_names=("row",),
        cluster=(plan.blocks,),
        cluster_names=("block",),
        interpret=launch.interpret,
        kernel_name="cutoffs",
    )(logits.reshape(R, -1, WARPS, LANES), scale, top_k, top_p)
    return outputs[0][:, 0]


class _Row(NamedTuple):
    """A block's part of a row: how far each logit lies below the largest one; infinite where there
    is no logit.

    Attributes:
      few: pieces [n, 4, 32] in registers.
      rest_smem: pieces [.., n, 4, 32].
      nearest: [4], all equal: the least of the rest of the whole row.
    """

    few: Sequence[jax.Array]
    rest_smem: Any
    nearest: jax.Array
    exchange: Exchange

    def add_few(self, limits: Sequence[jax.Array], weigh: Callable) -> list[jax.Array]:
        """Sums [4, 32] of the weights of the few up to limits [4]."""
        sums = _sums(self.few[0], limits, weigh)
        for x in self.few[1:]:
            sums = _plus(sums, _sums(x, limits, weigh))
        return sums

    def add_rest(
        self, sums: list[jax.Array], limits: Sequence[jax.Array], weigh: Callable, turns: Any
    ) -> list[jax.Array]:
        """Adds the weights of the rest `turns` times: 0 or 1."""
        add = lambda i, sums: _plus(sums, _sums(_read(self.rest_smem.at[i]), limits, weigh))
        return lax.fori_loop(0, len(self.rest_smem) * turns, add, sums)


def _sums(x: jax.Array, limits: Sequence[jax.Array], weigh: Callable) -> list[jax.Array]:
    weights = weigh(x)
    # A product takes fewer instructions than a choice: it is added in the same one.
    is_up_to = [jnp.where(x <= _wide(limit, len(x)), 1.0, 0.0) for limit in limits]
    return [jnp.sum(mask * weights, axis=0) for mask in is_up_to]


def _plus(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def _load(plan: _CutoffPlan, logits_gmem, scale, block, rest_smem, exchange: Exchange) -> _Row:
    """Reads a block's part of a row [columns, 4, 32]."""
    n = plan.piece
    number = plgpu.broadcasted_iota(jnp.int32, (n, WARPS, LANES), 0, layout=PART)

    def load(quarter):
        # The last pieces end with the row. What one shares with the piece before does not count,
        # and nothing counts of a piece that does not exist.
        firsts = [(block * _SHARE + quarter) * plan.few + i * n for i in range(_FEW)]
        begins = [lax.min(first, plan.columns - n) for first in firsts]
        pieces = [_read(logits_gmem.at[pl.ds(begin, n)]) for begin in begins]
        bounds = zip(pieces, firsts, begins, strict=True)
        return [jnp.where(number >= first - begin, x, -jnp.inf) for x, first, begin in bounds]

    def keep(quarter, found):
        *few, second = found
        for i, x in enumerate(load(quarter)):
            other, few[i] = jnp.minimum(few[i], x), jnp.maximum(few[i], x)
            rest_smem[(quarter - 1) * _FEW + i] = other
            second = jnp.maximum(second, jnp.max(other, axis=0))
        return *few, second

    none = plgpu.layout_cast(jnp.full((WARPS, LANES), -jnp.inf), LAYOUT)
    *few, second = lax.fori_loop(1, _SHARE, keep, (*load(0), none))
    largest = functools.reduce(jnp.maximum, [jnp.max(x, axis=0) for x in few])
    numbers = exchange([jnp.max(x, axis=1) for x in (largest, second)], MAXIMA)
    largest, second = (jnp.max(x, axis=1) for x in numbers)
    wide = _wide(largest, n)
    below = lambda x, largest: jnp.abs((x - largest) * scale)

    def convert(i, _):
        rest_smem[i] = below(_read(rest_smem.at[i]), wide)

    lax.fori_loop(0, plan.rest, convert, None)
    few = [below(x, wide) for x in few]
    return _Row(few, rest_smem, below(second, largest), exchange)


def _top_k(row: _Row, top_k, likely: int) -> jax.Array:
    """Bits of the limit [4] of top-k; of infinity if it is off."""
    goal = lax.convert_element_type(lax.min(top_k, 1 << 24), jnp.float32)  # more than any row has
    is_likely = (top_k <= likely).astype(jnp.int32)
    return _least_with(row, goal, jnp.ones_like, (top_k > 0).astype(jnp.int32), is_likely)


def _top_p(row: _Row, top_p, limit) -> jax.Array:
    """Bits of the limit [4] of top-p among the tokens up to a limit [4]; of infinity if it is
    off."""
    asks = (top_p < 1.0).astype(jnp.int32)
    weigh = lambda x: jnp.exp2(x * -_LOG2_E)
    limits = [_float(limit)]

    def masses(_, found):
        few = row.add_few(limits, weigh)
        everything = row.add_rest(few, limits, weigh, _any(row.nearest <= limits[0]))
        return row.exchange.totals(few + everything, MASSES)

    none = plgpu.layout_cast(jnp.zeros((WARPS,), jnp.float32), LAYOUT.reduce(1))
    few, everything = lax.fori_loop(0, asks, masses, [none, none])
    goal = top_p * everything
    return _least_with(row, goal, weigh, asks, _any(few >= goal))


def _least_with(row: _Row, goal, weigh: Callable, asks, likely) -> jax.Array:
    """Bits of the least limit [4] of a row such that the weights up to it add up to the goal.

    One order of sums serves all limits, so rounding keeps them monotone in the limit.

    Args:
      goal: scalar or [4].
      weigh: function from values to their weights.
      asks: 1 if the limit is wanted, else 0: then it is infinity.
      likely: 1 if it may lie among the few, else 0.
    """

    def search(whole, found):
        # Again among all: if nothing is found yet, or some of the rest is within what is found.
        is_open = jnp.where(whole == 0, likely, _any(row.nearest <= _float(found)))
        turns = is_open * asks

        def find_bits(i, bits):
            shift = _BITS * (_PASSES - 1 - i)
            most = jnp.where(i == 0, 1, 3)  # the first pass finds one bit, because the sign is 0
            # The bits below those of this pass are 1: a sum is over all limits that begin as its
            # own.
            ends = [(jnp.minimum(k, most + 1) << shift) - 1 for k in range(1, 1 << _BITS)]
            limits = [_float(bits + end) for end in ends]
            sums = row.add_rest(row.add_few(limits, weigh), limits, weigh, whole)
            missed = [
                (x < goal).astype(jnp.int32) for x in row.exchange.totals(sums, i & 1, (i >> 1) & 1)
            ]
            return bits + (jnp.minimum(functools.reduce(jnp.add, missed), most) << shift)

        return lax.fori_loop(0, _PASSES * turns, find_bits, found * (1 - turns))

    return lax.fori_loop(0, 2, search, _each(_INFINITY))


def _read(ref) -> jax.Array:
    return plgpu.load(ref, layout=PART, optimized=False)


def _float(bits: jax.Array) -> jax.Array:
    """The floats of bits [4], at most infinity."""
    return lax.bitcast_convert_type(jnp.minimum(bits, _INFINITY), jnp.float32)


def _each(value: int) -> jax.Array:
    """int32 [4], one for each warp."""
    return plgpu.layout_cast(jnp.full((WARPS,), value, jnp.int32), LAYOUT.reduce(1))


def _wide(number: jax.Array, count: int) -> jax.Array:
    """[4] -> [count, 4, 32]."""
    return lax.broadcast_in_dim(number, (count, WARPS, LANES), (1,))


def _any(x: jax.Array) -> jax.Array:
    """1 if one of bool [4] is true, else 0."""
    return jnp.max(x.astype(jnp.int32))
