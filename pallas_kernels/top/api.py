"""The largest values of rows, with their places."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.top import reference

COUNT = 16
"""Values that the kernel finds in a row."""
_TILE = 64
_LEAST, _MOST = 1024, 2**19
"""A warp chooses among maxima of 2,048 tiles of the longest row, 64 per thread."""


def top(
    values: jax.Array, count: int, *, implementation: dispatch.Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of `values`, largest first; equal ones by ascending index.

    The first is that of `jnp.argmax` where no value is NaN. NaN counts as -inf. If fewer than
    `count` values are above -inf, the places of the others are any.

    Args:
      values: [..., V] float32 with V at least `count`.
    Returns:
      (indices [..., count] int32, values [..., count] float32).
    Raises:
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    launch = _resolve(implementation, values, count)
    if launch is None:
        return reference.top(values, count)
    from pallas_kernels.top import mosaic_gpu  # slow to import

    *leading, V = values.shape
    largest = mosaic_gpu.top(values.reshape(-1, V), launch=launch)
    return tuple(x.reshape(*leading, count) for x in largest)


def _resolve(
    implementation: dispatch.Implementation | None, values: jax.Array, count: int
) -> dispatch.Launch | None:
    V, refusal = values.shape[-1], None
    if count != COUNT:
        refusal = f"it finds {COUNT} values, not {count}"
    elif V < _LEAST or V % _TILE:
        refusal = f"{V} values are not a multiple of {_TILE} from {_LEAST}"
    elif V > _MOST:
        refusal = f"{V} values are more than {_MOST}"
    elif values.dtype != jnp.float32:
        refusal = f"{values.dtype} is not float32"
    return dispatch.resolve("top", implementation, refusal=refusal)
