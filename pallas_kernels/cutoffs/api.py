"""The cutoffs of top-k and top-p: how far below the largest logit of its row a token may lie."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.cutoffs import reference

_COLUMNS = 128
_LEAST = 1024
_MOST = 2**18
"""Most logits of a row. Three quarters of them lie in the shared memory
of eight thread blocks; a thread of the longest row has 256, of which it holds 64 in registers."""


def cutoffs(
    logits: jax.Array,
    scale: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """The least limits that keep enough tokens of rows for top-k and top-p.

    A token lies `below = |(logit - largest logit) * scale|` below the likeliest one, in float32.
    Top-k keeps the least limit up to which there are `top_k` tokens. Among the tokens up to it, of
    weight exp(-below), top-p keeps the least limit up to which their mass is `top_p` of the whole.
    The result is the lower one: exactly one of the row's `below`, or infinity where no limit keeps
    enough. Where a mass is within rounding of its goal, implementations may differ. A row that
    contains NaN, or has no finite maximum, may have any limit. A row's bits do not depend on the
    others.

    Args:
      logits: [..., V] float32.
      scale: [...] float32, positive: the inverse of the temperature.
      top_k: [...] int32; 0: off.
      top_p: [...] float32; 1: off.
    Returns:
      [...] float32; infinity for rows without filters.
    Raises:
      NotImplementedError: the kernel is requested and does not support these arguments.
    """
    launch = _resolve(implementation, logits)
    if launch is None:
        return reference.cutoffs(logits, scale, top_k, top_p)
    from pallas_kernels.cutoffs import mosaic_gpu  # slow to import

    *leading, V = logits.shape
    limits = mosaic_gpu.cutoffs(
        logits.reshape(-1, V),
        scale.reshape(-1),
        top_k.reshape(-1),
        top_p.reshape(-1),
        launch=launch,
    )
    return limits.reshape(leading)


def has_kernel(logits: jax.Array) -> bool:
    """Whether a kernel runs for these logits, unless an implementation is requested."""
    return _resolve(None, logits) is not None


def _resolve(
    implementation: dispatch.Implementation | None, logits: jax.Array
) -> dispatch.Launch | None:
    V, refusal = logits.shape[-1], None
    if V < _LEAST or V % _COLUMNS:
        refusal = f"{V} logits are not a multiple of {_COLUMNS} from {_LEAST}"
    elif V > _MOST:
        refusal = f"{V} logits are more than {_MOST}"
    elif logits.dtype != jnp.float32:
        refusal = f"{logits.dtype} is not float32"
    return dispatch.resolve("cutoffs", implementation, refusal=refusal)
