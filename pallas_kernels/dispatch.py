"""Selects the implementation of an operation and logs the choice once; no silent fallback.

`reference` is the jnp definition of an operation and runs on every XLA backend. `mosaic_gpu` is a Pallas
kernel: compiled on a GPU, run in Mosaic's interpreter on a CPU (for tests). Without an explicit request
the device decides: kernels where they exist, references elsewhere.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax

from pallas_kernels.device import H200, Device, describe

Implementation = Literal["reference", "mosaic_gpu"]

_log = logging.getLogger(__name__)
_assumed: ContextVar[Device | None] = ContextVar("assumed device", default=None)
_referring: ContextVar[bool] = ContextVar("references only", default=False)


class Launch(NamedTuple):
    """Launch parameters of a kernel: its target chip, and the `interpret` argument of `plgpu.kernel`."""

    device: Device
    interpret: Any = None


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Traces for `device` instead of the default device, to compile for an absent chip."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Traces references only, also where a kernel is requested: the baseline of a comparison."""
    token = _referring.set(True)
    try:
        yield
    finally:
        _referring.reset(token)


def resolve(
    op: str,
    requested: Implementation | None,
    *,
    chips: tuple[int, ...] = (),
    refusal: str | None = None,
) -> Launch | None:
    """Selects the implementation of `op`: launch parameters of the kernel, or None for the reference.

    Args:
      op: name of the operation, for messages.
      requested: the required implementation; None: the device decides.
      chips: compute capabilities (90, 100) with a kernel.
      refusal: why the kernel does not support these arguments; None if it does.
    Raises:
      NotImplementedError: the requested kernel does not exist or does not support the arguments.
    """
    if requested == "reference" or _referring.get():
        return None
    assumed = _assumed.get()
    if requested is not None:
        device = assumed or _default_device() or H200
        if device.sm not in chips or refusal is not None:
            why = refusal or f"none is made for {device.name}"
            raise NotImplementedError(
                f"{op} has no {requested} kernel for this: {why}; use implementation='reference'"
            )
        on_cpu = assumed is None and jax.default_backend() == "cpu"
        return Launch(device, _interpreter() if on_cpu else None)
    device = assumed or _default_device()
    platform = jax.default_backend() if assumed is None else "gpu"
    if device is None or device.sm not in chips or refusal is not None:
        _say(op, "reference", platform if device is None else device.name, refusal)
        return None
    _say(op, "mosaic_gpu", device.name, None)
    return Launch(device)


def _interpreter() -> Any:
    # Imported here: a slow import that CPU use does not need.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


@functools.cache
def _default_device() -> Device | None:
    return describe(jax.devices()[0])


@functools.cache
def _say(op: str, chosen: Implementation, where: str, refusal: str | None) -> None:
    quiet = where == "cpu" or chosen != "reference"
    because = f": {refusal}" if refusal else ""
    _log.log(
        logging.INFO if quiet else logging.WARNING,
        "%s runs its %s implementation on %s%s",
        op,
        chosen,
        where,
        because,
    )
