"""The 16 largest values of four segments that a warpgroup holds in registers.

A warp holds a segment, so its maximum takes five shuffles and no barrier.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Launch

COUNT = 16
SEGMENTS = 4
LOWEST = float(jnp.finfo(jnp.float32).min)
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (1,))), (-3,), (-2,), -1)
"""Row s of [4, n], n a multiple of 32, lies in warp s."""
_NONE = 2**30
"""Above all places."""


def extract(values: list, column, starts: list, store: Callable) -> None:
    """Calls `store(i, value, place)` with the i-th largest of each segment, both [4], for i below
    16.

    Of equal values the lowest place comes first. The place of an element is its `column` plus the
    start of its array: places of all arrays would take as many registers as the values.

    Args:
      values: float32 [4, n] each, finite.
      column: int32 [4, n], or 0.
      starts: of each array, int32, a scalar or [4, n], in any order.
    """

    def take(i, values):
        best = jnp.max(functools.reduce(jnp.maximum, values), axis=1)
        wide = _broadcast(best, values[0].shape)
        pairs = zip(values, starts, strict=True)
        ties = [jnp.where(x == wide, start, _NONE) for x, start in pairs]
        place = jnp.min(column + functools.reduce(jnp.minimum, ties), axis=1)
        store(i, best, place)
        taken = _broadcast(place, wide.shape) - column
        pairs = zip(values, starts, strict=True)
        return [jnp.where(start == taken, -jnp.inf, x) for x, start in pairs]

    lax.fori_loop(0, COUNT, take, values)


def iota(axis: int, columns: int) -> jax.Array:
    """int32 [4, columns]."""
    return plgpu.broadcasted_iota(jnp.int32, (SEGMENTS, columns), axis, layout=LAYOUT)


def load(ref, layout=LAYOUT) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def load_values(ref, layout=LAYOUT) -> jax.Array:
    """NaN and -inf become the lowest finite number: -inf marks what is taken already."""
    x = load(ref, layout)
    return jnp.where(x > LOWEST, x, LOWEST)


def launch_kernel(body, out, grid, names, launch: Launch, name: str) -> Callable:
    """`plgpu.kernel` of one warpgroup per block without shared memory."""
    return plgpu.kernel(
        body,
        out_type=out,
        # Safe: no thread reads what another has written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        grid=grid,
        grid_names=names,
        interpret=launch.interpret,
        kernel_name=name,
    )


def _broadcast(segments: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(segments, shape, (0,))
