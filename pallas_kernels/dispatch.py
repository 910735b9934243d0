"""Chooses how an operation runs and says so once in the log; never a silent fallback.

`reference` is the jnp definition of an operation and runs wherever XLA runs. `mosaic_gpu` is a Pallas
kernel: on a GPU it is compiled, on a CPU it runs in Mosaic's interpreter, which is for tests. What is
not asked for explicitly follows the device: kernels where they exist, references elsewhere.
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
    """How to launch a kernel: the chip it is made for, and `plgpu.kernel`'s `interpret` argument."""

    device: Device
    interpret: Any = None


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Traces for `device` whatever the default one is: to compile for a chip that is not there."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Traces references, whatever is asked for: what a kernel is compared with."""
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
    """How `op` runs here: a kernel's launch, or None for the reference.

    Args:
      op: name of the operation, as its folder.
      requested: what the caller insists on; None lets the device decide.
      chips: compute capabilities (90, 100) that the kernel is made for.
      refusal: why the kernel cannot take these arguments, None if it can.
    Raises:
      NotImplementedError: the requested kernel does not exist, or refuses.
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
    # Here, because it is a slow import that plain use on a CPU spares.
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
