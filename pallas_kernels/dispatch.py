"""Chooses how an operation runs and says so once in the log; never a silent fallback.

`reference` is the jnp definition of an operation and runs wherever XLA runs. `mosaic_gpu` is a Pallas
kernel. An operation without a kernel for the platform runs its reference, and the log names it.
"""

import functools
import logging
from typing import Literal

import jax

Implementation = Literal["reference", "mosaic_gpu"]

_log = logging.getLogger(__name__)


@functools.cache
def resolve(
    op: str, requested: Implementation | None, kernels: tuple[Implementation, ...]
) -> Implementation:
    """Implementation of `op` on the default platform.

    Args:
      op: name of the operation, as its folder.
      requested: what the caller insists on; None lets the platform decide.
      kernels: implementations that exist beside the reference.
    Raises:
      NotImplementedError: the requested kernel does not exist.
    """
    if requested == "reference":
        return "reference"
    if requested is not None:
        if requested not in kernels:
            raise NotImplementedError(
                f"{op} has no {requested} kernel; use implementation='reference'"
            )
        return requested
    platform = jax.default_backend()
    chosen = "mosaic_gpu" if platform == "gpu" and "mosaic_gpu" in kernels else "reference"
    level = logging.INFO if platform == "cpu" or chosen != "reference" else logging.WARNING
    _log.log(level, "%s runs its %s implementation on %s", op, chosen, platform)
    return chosen
