"""Kernel of RMSNorm with an optional residual sum, for Hopper and Blackwell: one thread block per row.

A row is divided into strips of 512 columns, four per thread. All strips are loaded to registers before
anything is stored, because small batches are bound by latency. The only traffic between threads is the
sum of squares. The order of that sum depends on the width only, so the bits of a row do not depend on
other rows.

Hazard: Mosaic's cross-warp reduction uses one scratch buffer per block but synchronises one warpgroup
only. If warpgroups reduced different numbers at the same time, they would race. So the warpgroups first
exchange their squares through shared memory, and then all reduce the same numbers.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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

    If strips do not divide the row, the last strip starts early and overlaps the one before it. Both must
    belong to one warpgroup, because two warpgroups must not write the same columns.
    """
    strip = 8 if tiles >= 8 else 4
    needed = -(-tiles // strip)
    together = 1 if tiles % strip == 0 else 2
    for groups in range(_MAX_GROUPS, 1, -1):
        strips = -(-needed // groups)
        if needed - (groups - 1) * strips >= together:
            return TuningConfig(strip, groups, strips)
    return TuningConfig(strip, 1, needed)


@functools.partial(jax.jit, static_argnames=("eps", "launch"))
def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, launch: Launch) -> jax.Array:
    """x [R, D], scale [D] -> [R, D]."""
    (normed,) = _launch(x, None, None, None, None, scale, eps, launch)
    return normed


@functools.partial(jax.jit, static_argnames=("eps", "launch"))
def add_rms_norm(
    h: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    weights: jax.Array | None,
    sources: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """h [R, D], parts [S, R, D], scale [D][, bias [D]] -> sum [R, D], normed [R, D].

    With sources [S, R'], parts is a buffer [P, D]: part s of row r is parts[sources[s, r]] * weights[s, r].
    bfloat16 parts stay bfloat16 in registers until they are added, to halve the register count.
    """
    return _launch(h, parts, weights, sources, bias, scale, eps, launch)


def _launch(
    h, parts, weights, sources, bias, scale, eps: float, launch: Launch
) -> tuple[jax.Array, ...]:
    R, D = h.shape
    S = 0 if parts is None else parts.shape[0] if sources is None else sources.shape[0]
    tiles = D // _TILE
    config = tuning(tiles)
    shape = (config.strip, _TILE)
    layout = plgpu.Layout.WG_STRIDED(shape, config.strip * _TILE // 128)
    load = lambda ref: plgpu.load(ref, layout=layout, optimized=False)

    def norm_row(
        h_gmem,  # [R, tiles, 64]
        parts_gmem,  # [S * R or P, tiles, 64] or None
        weights_gmem,  # [S, R'] or None
        sources_gmem,  # [S, R'] or None
        bias_gmem,  # [tiles, 64] or None
        scale_gmem,  # [tiles, 64]
        outs_gmem,  # each [R, tiles, 64]: the sum, if any, and the norm
        squares_smem,  # [groups, strip, 64] float32
        stored_barrier,  # all warpgroups have stored their squares
    ):
        r, g = lax.axis_index("row"), lax.axis_index("group")
        begins = [(g * config.strips + i) * config.strip for i in range(config.strips)]
        strips = [pl.ds(lax.min(begin, tiles - config.strip), config.strip) for begin in begins]
        rows = [load(h_gmem.at[r, strip]) for strip in strips]
        if S:
            part = lambda s: s * R + r if sources is None else sources_gmem[s, r]
            part_rows = [part(s) for s in range(S)]
            deltas = [[load(parts_gmem.at[i, strip]) for i in part_rows] for strip in strips]
            shares = None if weights is None else [weights_gmem[s, r] for s in range(S)]
            biases = [None if bias is None else load(bias_gmem.at[strip]) for strip in strips]
        scales = [load(scale_gmem.at[strip]) for strip in strips]
        if S:
            rows = [_added(*added, shares) for added in zip(rows, deltas, biases, strict=True)]
            for x, strip in zip(rows, strips, strict=True):
                outs_gmem[0][r, strip] = x
        rows = [x.astype(jnp.float32) for x in rows]
        squares = [x * x for x in rows]
        if tiles != config.strip * config.groups * config.strips:
            # Mask the tiles that overlap the strip before, so that they count once.
            tile = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            squares = [
                jnp.where(tile + strip.start >= begin, square, 0.0)
                for square, strip, begin in zip(squares, strips, begins, strict=True)
            ]
        square = _summed(squares)
        if config.groups > 1:
            squares_smem[g] = square
            plgpu.commit_smem()  # orders the stores of all threads of the warpgroup before the arrive
            plgpu.barrier_arrive(stored_barrier)
            plgpu.barrier_wait(stored_barrier)
            square = _summed([load(squares_smem.at[i]) for i in range(config.groups)])
        factor = lax.rsqrt(jnp.sum(square) / D + eps)
        for x, scaled, strip in zip(rows, scales, strips, strict=True):
            outs_gmem[-1][r, strip] = (x * factor * scaled.astype(jnp.float32)).astype(h.dtype)

    def body(*refs):
        refs = list(refs)
        h_gmem = refs.pop(0)
        parts_gmem = refs.pop(0) if S else None
        weights_gmem = refs.pop(0) if weights is not None else None
        sources_gmem = refs.pop(0) if sources is not None else None
        bias_gmem = refs.pop(0) if bias is not None else None
        scale_gmem, *outs_gmem, squares_smem, stored_barrier = refs
        added = (parts_gmem, weights_gmem, sources_gmem, bias_gmem)
        norm_row(h_gmem, *added, scale_gmem, outs_gmem, squares_smem, stored_barrier)

    in_tiles = lambda x: None if x is None else x.reshape(-1, tiles, _TILE)
    columns = [None if x is None else x.reshape(tiles, _TILE) for x in (bias, scale)]
    operands = (in_tiles(h), in_tiles(parts), weights, sources, *columns)
    outs = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((R, tiles, _TILE), h.dtype),) * (2 if S else 1),
        scratch_types=(
            plgpu.SMEM((config.groups, *shape), jnp.float32),
            plgpu.Barrier(num_arrivals=config.groups),
        ),
        # Safe: squares_smem is the only ref both written and read, with stored_barrier in between.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=(R,),
        grid_names=("row",),
        num_threads=config.groups,
        thread_name="group",
        interpret=launch.interpret,
        kernel_name="add_rms_norm" if S else "rms_norm",
    )(*(x for x in operands if x is not None))
    return tuple(out.reshape(R, D) for out in outs)


def _added(x, parts, bias, shares):
    """A strip of h plus its weighted parts and the bias, rounded to the dtype of h."""
    parts = [part.astype(jnp.float32) for part in parts]
    if shares is not None:
        parts = [part * share for part, share in zip(parts, shares, strict=True)]
    wide, total = x.astype(jnp.float32), _summed(parts)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return (wide + total).astype(x.dtype)


def _summed(terms):
    """Sum in ascending order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
