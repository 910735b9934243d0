"""Selects the implementation of an operation and logs the choice once; no silent fallback.

`reference` is the jnp definition of an operation and runs on every XLA backend. `mosaic_gpu` is a Pallas
kernel: compiled on an NVIDIA GPU, run in Mosaic's interpreter on a CPU (for tests). Without an explicit
request the device decides: kernels where they exist, references elsewhere.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import jax

from pallas_kernels.device import GENERATIONS, H200, Device, describe

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


def platform() -> str:
    """The platform that is traced for, as `Device.platform`: of the assumed device, else the default one."""
    assumed = _assumed.get()
    return jax.default_backend() if assumed is None else assumed.platform


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
      chips: generations (`Device.sm`) with a kernel.
      refusal: why the kernel does not support these arguments; None if it does.
    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the requested kernel does not exist for the device, or does not support the
        arguments.
    """
    if requested not in (None, *get_args(Implementation)):
        raise ValueError(f"{op}: {requested=} must be one of {get_args(Implementation)}, or None")
    if requested == "reference" or _referring.get():
        return None
    assumed = _assumed.get()
    device = assumed or _default_device()
    if requested is None:
        why = _no_kernel(device, chips) or refusal
        _say(op, device, why)
        return Launch(device) if why is None else None
    interpreted = assumed is None and jax.default_backend() == "cpu"
    if device.platform == "cpu":
        device = H200  # the chip that Mosaic's interpreter imitates
    if why := _no_kernel(device, chips) or refusal:
        raise NotImplementedError(
            f"{op} has no {requested} kernel for this on {device}: {why}; use implementation='reference'"
        )
    return Launch(device, _interpreter() if interpreted else None)


def _no_kernel(device: Device, chips: tuple[int, ...]) -> str | None:
    """Why an operation with kernels for `chips` has none for `device`; None if it has one."""
    if device.platform != "cuda":
        return "its kernel is for NVIDIA GPUs"
    if not chips:
        return "it has no kernel for any chip"
    return None if device.sm in chips else f"its kernel is for {_targets(chips)}"


def _targets(chips: tuple[int, ...]) -> str:
    return ", ".join(f"sm_{sm}" for sm in chips)


def _interpreter() -> Any:
    # Imported here: a slow import that CPU use does not need.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


@functools.cache
def _default_device() -> Device:
    return describe(jax.devices()[0])


def _say(op: str, device: Device, why: str | None) -> None:
    """Logs a choice: one line for a device without any kernel, else one for each operation and reason."""
    if device.platform == "cpu":
        _once(logging.INFO, "all operations run their reference implementation on cpu")
    elif device.platform != "cuda" or device.sm not in GENERATIONS:
        kernels = f"the kernels are for NVIDIA GPUs: {_targets(tuple(GENERATIONS))}"
        _once(
            logging.WARNING,
            f"all operations run their reference implementation on {device}: {kernels}",
        )
    elif why:
        _once(logging.WARNING, f"{op} runs its reference implementation on {device}: {why}")
    else:
        _once(logging.INFO, f"{op} runs its mosaic_gpu implementation on {device}")


@functools.cache
def _once(level: int, message: str) -> None:
    _log.log(level, "%s", message)
