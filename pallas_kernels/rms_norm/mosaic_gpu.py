"""Kernel of RMSNorm with an optional residual sum, for Hopper and Blackwell: one thread block per
row.

A row is divided into strips of 512 columns, four per thread. All strips are loaded to registers
before anything is stored, because small batches are bound by latency. The only traffic between
threads is the sum of squares. The order of that sum depends on the width only, so the bits of a row
do not depend on other rows.

Hazard: Mosaic's cross-warp reduction uses one scratch buffer per block but synchronises one
warpgroup only. If warpgroups reduced different numbers at the same time, they would race. So the
warpgroups first exchange their squares through shared memory, and then all reduce the same numbers.
Two norms of a row are two such reductions. The second takes squares and a phase of the barrier of
its own: no warpgroup begins it before all have stored squares that depend on the result of the
first.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import rounded
from pallas_kernels.dispatch import Launch

_TILE = 64
"""Columns per tile; strips start at multiples of it, so 16-byte loads are aligned."""
_MAX_GROUPS = 4


@dataclass(frozen=True)
class TuningConfig:
    """Distribution of a row over the threads of a block.

    Attributes:
      strip: tiles per strip, 8 or 4: four or two columns per thread.
      groups: warpgroups (128 threads) per block.
      strips: strips per warpgroup.
    """

    strip: int
    groups: int
    strips: int


def tuning(tiles: int) -> TuningConfig:
    """Config with the fewest strips per thread, in at most four warpgroups.

    If strips do not divide the row, the last strip starts early and overlaps the one before it.
    Both must belong to one warpgroup, because two warpgroups must not write the same columns.
    """
    strip = 8 if tiles >= 8 else 4
    needed = -(-tiles // strip)
    together = 1 if tiles % strip == 0 else 2
    for groups in range(_MAX_GROUPS, 1, -1):
        strips = -(-needed // groups)
        if needed - (groups - 1) * strips >= together:
            return TuningConfig(strip, groups, strips)
    return TuningConfig(strip, 1, needed)


class Added(NamedTuple):
    """What becomes of h before it is normed, see `api.add_rms_norm`. In the kernel these are refs.

    Attributes:
      parts: [parts, R, D], or with sources a buffer [slots, D].
      weights: [parts, R'] float32 with sources: part s of row r is parts[sources[s, r]] *
        weights[s, r].
      sources: [parts, R'] int32.
      bias: [D].
      inner_scale: [D], of the norm of the sum of the parts.
      factor: [1], of h plus that sum.
    """

    parts: Any
    weights: Any = None
    sources: Any = None
    bias: Any = None
    inner_scale: Any = None
    factor: Any = None


class RowNorm(NamedTuple):
    """The norm of one row by all warpgroups of a block.

    Attributes:
      D: columns of the row.
      dtype: of h.
      eps: of the norm.
      inner_eps: of the norm of the sum of the parts, if any.
    """

    D: int
    dtype: jnp.dtype
    eps: float
    inner_eps: float | None

    @property
    def config(self) -> TuningConfig:
        return tuning(self.D // _TILE)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a strip."""
        return self.config.strip, _TILE

    @property
    def layout(self) -> Any:
        """Of a strip in registers."""
        return plgpu.Layout.WG_STRIDED(self.shape, self.config.strip * _TILE // 128)

    def scratch(self, num_norms: int) -> tuple[Any, Any]:
        """Of a block that norms so many times: squares_smem and stored_barrier of calls."""
        groups = self.config.groups
        squares = plgpu.SMEM((num_norms, groups, *self.shape), jnp.float32)
        return squares, plgpu.Barrier(num_arrivals=groups)

    def load(
        self,
        r: Any,
        R: int,
        g: Any,
        h_gmem: Any,  # [R, tiles, 64]
        added_gmem: Added | None,  # [..., tiles, 64] for [..., D]
        scale_gmem: Any,  # [tiles, 64]
    ) -> "LoadedRow":
        """Loads what warpgroup g needs of row r of R."""
        tiles, config = self.D // _TILE, self.config
        load = lambda ref: plgpu.load(ref, layout=self.layout, optimized=False)
        begins = [(g * config.strips + i) * config.strip for i in range(config.strips)]
        strips = [pl.ds(lax.min(begin, tiles - config.strip), config.strip) for begin in begins]

        def columns(ref):
            return [None if ref is None else load(ref.at[strip]) for strip in strips]

        rows = [load(h_gmem.at[r, strip]) for strip in strips]
        if added_gmem is None:
            return LoadedRow(begins, strips, rows, None, False, columns(scale_gmem))
        parts_gmem, weights_gmem, sources_gmem, *_ = added_gmem
        num_parts = parts_gmem.shape[0] // R if sources_gmem is None else sources_gmem.shape[0]
        part = lambda s: s * R + r if sources_gmem is None else sources_gmem[s, r]
        part_rows = [part(s) for s in range(num_parts)]
        added = Added(
            parts=[[load(parts_gmem.at[i, strip]) for i in part_rows] for strip in strips],
            weights=None
            if weights_gmem is None
            else [weights_gmem[s, r] for s in range(num_parts)],
            bias=columns(added_gmem.bias),
            inner_scale=columns(added_gmem.inner_scale),
            factor=None if added_gmem.factor is None else added_gmem.factor[0],
        )
        has_inner = added_gmem.inner_scale is not None
        return LoadedRow(begins, strips, rows, added, has_inner, columns(scale_gmem))

    def __call__(
        self,
        row: "LoadedRow",
        g: Any,
        sum_gmem: Any,  # [tiles, 64], if something is added
        # [norms, groups, strip, 64] float32; no other call of the block uses them
        squares_smem: Any,
        stored_barrier: Any,  # all warpgroups have stored their squares; completes once a norm
    ) -> Iterator[tuple[Any, jax.Array]]:
        """Stores the sum of a row; yields the strips of warpgroup g, and what the norm makes of
        each, in float32."""
        tiles, config = self.D // _TILE, self.config
        load = lambda ref: plgpu.load(ref, layout=self.layout, optimized=False)

        def inverse_root(rows, eps, norm):
            """1 / root mean square of a row; `rows` are the float32 strips of this warpgroup."""
            squares = [x * x for x in rows]
            if tiles != config.strip * config.groups * config.strips:
                # Mask the tiles that overlap the strip before, so that they count once.
                tile = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
                squares = [
                    jnp.where(tile + strip.start >= begin, square, 0.0)
                    for square, strip, begin in zip(squares, row.strips, row.begins, strict=True)
                ]
            square = _summed(squares)
            if config.groups > 1:
                squares_smem[norm, g] = square
                # orders the stores of all threads of the warpgroup before the arrive
                plgpu.commit_smem()
                plgpu.barrier_arrive(stored_barrier)
                plgpu.barrier_wait(stored_barrier)
                square = _summed([load(squares_smem.at[norm, i]) for i in range(config.groups)])
            return lax.rsqrt(jnp.sum(square) / self.D + eps)

        def normed(x, scale, root):
            return x * root * scale.astype(jnp.float32)

        rows, num_norms = row.rows, 1
        if (added := row.added) is not None:
            terms = zip(rows, added.parts, added.bias, strict=True)
            sums = (_terms(*of_strip, added.weights) for of_strip in terms)
            if row.has_inner:
                num_norms = 2
                rows, totals = zip(*sums, strict=True)
                deltas = [total.astype(self.dtype).astype(jnp.float32) for total in totals]
                root = inverse_root(deltas, self.inner_eps, 0)
                terms = zip(rows, deltas, added.inner_scale, strict=True)
                sums = [(x, normed(*term, root).astype(self.dtype)) for x, *term in terms]
            rows = [_added(*terms, added.factor, self.dtype) for terms in sums]
            for x, strip in zip(rows, row.strips, strict=True):
                sum_gmem[strip] = x
        rows = [x.astype(jnp.float32) for x in rows]
        root = inverse_root(rows, self.eps, num_norms - 1)
        for x, scale, strip in zip(rows, row.scales, row.strips, strict=True):
            yield strip, normed(x, scale, root)


class LoadedRow(NamedTuple):
    """A warpgroup's part of a row in registers, a list entry for each of its strips.

    Attributes:
      begins: first tile of each strip, if none overlapped the one before.
      strips: the tiles.
      rows: strips of h.
      added: of the strips: parts, bias and inner_scale; weights and factor are scalars.
      has_inner: whether the sum of the parts is normed.
      scales: strips of the scale.
    """

    begins: list[Any]
    strips: list[Any]
    rows: list[jax.Array]
    added: Added | None
    has_inner: bool
    scales: list[jax.Array]


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "launch"))
def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, out_dtype: jnp.dtype, launch: Launch
) -> jax.Array:
    """x [R, D], scale [D] -> [R, D]."""
    (normed,) = _launch(x, None, scale, eps, None, (out_dtype,), launch)
    return normed


@functools.partial(jax.jit, static_argnames=("eps", "inner_eps", "out_dtypes", "launch"))
def add_rms_norm(
    h: jax.Array,
    added: Added,
    scale: jax.Array,
    *,
    eps: float,
    inner_eps: float | None,
    out_dtypes: tuple[jnp.dtype, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    """h [R, D], scale [D] -> sum [R, D], and normed [R, D] in each dtype.

    bfloat16 parts stay bfloat16 in registers until they are added, to halve the register count.
    """
    return _launch(h, added, scale, eps, inner_eps, out_dtypes, launch)


def _launch(
    h,
    added: Added | None,
    scale,
    eps: float,
    inner_eps: float | None,
    out_dtypes: tuple[jnp.dtype, ...],
    launch: Launch,
) -> tuple[jax.Array, ...]:
    R, D = h.shape
    tiles = D // _TILE
    row_norm = RowNorm(D, h.dtype, eps, inner_eps)
    num_norms = 1 if added is None or added.inner_scale is None else 2
    out_dtypes = out_dtypes if added is None else (h.dtype, *out_dtypes)

    def body(*refs):
        *refs, squares_smem, stored_barrier = refs
        operands_gmem = jax.tree.unflatten(tree, refs[: len(leaves)])
        # Each [R, tiles, 64]: the sum, if any, and the norm in its dtypes.
        outs_gmem = refs[len(leaves) :]
        r, g = lax.axis_index("row"), lax.axis_index("group")
        sum_gmem = None if added is None else outs_gmem.pop(0).at[r]
        row = row_norm.load(r, R, g, *operands_gmem)
        for strip, x in row_norm(row, g, sum_gmem, squares_smem, stored_barrier):
            for out_gmem in outs_gmem:
                out_gmem[r, strip] = rounded(x, out_gmem.dtype)

    in_tiles = lambda x: None if x is None else x.reshape(-1, tiles, _TILE)
    columns_in_tiles = lambda x: None if x is None else x.reshape(tiles, _TILE)
    if added is not None:
        added = added._replace(
            parts=in_tiles(added.parts),
            bias=columns_in_tiles(added.bias),
            inner_scale=columns_in_tiles(added.inner_scale),
        )
    leaves, tree = jax.tree.flatten((in_tiles(h), added, columns_in_tiles(scale)))
    outs = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((R, tiles, _TILE), dtype) for dtype in out_dtypes),
        scratch_types=row_norm.scratch(num_norms),
        # Safe: squares_smem is the only ref both written and read, each part of it once with
        # stored_barrier in between.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(R,),
        grid_names=("row",),
        num_threads=row_norm.config.groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="rms_norm" if added is None else "add_rms_norm",
    )(*leaves)
    return tuple(out.reshape(R, D) for out in outs)


def _terms(x, parts, bias, shares):
    """A strip of h, and the sum of its weighted parts and the bias; both float32."""
    parts = [part.astype(jnp.float32) for part in parts]
    if shares is not None:
        parts = [part * share for part, share in zip(parts, shares, strict=True)]
    wide, total = x.astype(jnp.float32), _summed(parts)
    return wide, total if bias is None else total + bias.astype(jnp.float32)


def _added(wide, delta, factor, dtype):
    """A strip of h plus the delta, times the factor; rounded after each."""
    added = (wide + delta.astype(jnp.float32)).astype(dtype)
    if factor is None:
        return added
    return (added.astype(jnp.float32) * factor.astype(jnp.float32)).astype(dtype)


def _summed(terms):
    """Sum in ascending order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
