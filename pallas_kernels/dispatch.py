"""Selects the implementation of an operation and logs the choice once; no silent fallback.

`reference` is the jnp definition of an operation and runs on every XLA backend. `mosaic_gpu` and
`mosaic_tpu` are Pallas kernels: compiled on an NVIDIA GPU or a TPU, run in an interpreter on a CPU
(for tests). Without an explicit request the device decides: kernels where they exist, references
elsewhere.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import jax

from pallas_kernels.device import GENERATIONS, H200, V6E, Device, describe

CHIPS = tuple(GENERATIONS)
"""Generations (`Device.sm`) with kernels."""
Implementation = Literal["reference", "mosaic_gpu", "mosaic_tpu"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a program is traced for; the one ambient state of tracing.

    Attributes:
      device: the chip; None: the default device.
      references: whether references run also where a kernel is requested.
      rounds_products: float32 products of narrower inputs, in references, are rounded to the dtype
        of the inputs.
      num_devices: devices that run the program together (`peagle_jax.parallel.partition`).
      messages: what gathers their arrays in place of XLA's collectives, if anything.
    """

    device: Device | None = None
    references: bool = False
    rounds_products: bool = False
    num_devices: int = 1
    messages: Any = None


_SERVED = Trace()
_trace: ContextVar[Trace] = ContextVar("trace", default=_SERVED)


def trace() -> Trace:
    """The trace of this thread."""
    return _trace.get()


@contextlib.contextmanager
def traced(**changes: Any) -> Iterator[None]:
    """Traces with other fields of `Trace`."""
    token = _trace.set(dataclasses.replace(_trace.get(), **changes))
    try:
        yield
    finally:
        _trace.reset(token)


class Launch(NamedTuple):
    """Launch parameters of a kernel: its target chip, and the `interpret` argument of Pallas."""

    device: Device
    interpret: Any = None


def assume(device: Device) -> AbstractContextManager[None]:
    """Traces for `device` instead of the default device, to compile for an absent chip."""
    return traced(device=device)


def references(*, rounded: bool = False) -> AbstractContextManager[None]:
    """Traces references only, also where a kernel is requested: the baseline of a comparison.

    Args:
      rounded: float32 products of narrower inputs are rounded to the dtype of the inputs. For
        training: they are stored for the backward pass, and this halves their traffic.
    """
    return traced(references=True, rounds_products=rounded)


def as_served() -> AbstractContextManager[None]:
    """Undoes `references`, for a part of a training step without gradients: a frozen model."""
    return traced(references=False, rounds_products=False)


def device() -> Device:
    """The device that is traced for: the assumed device, else the default one."""
    return trace().device or _default_device()


def platform() -> str:
    """The platform that is traced for, as `Device.platform`."""
    return device().platform


NO_TPU_KERNEL = "it has no kernel for a TPU"


def resolve(
    op: str,
    requested: Implementation | None,
    *,
    chips: tuple[int, ...] = CHIPS,
    refusal: str | None = None,
    tpu_refusal: str | None = NO_TPU_KERNEL,
) -> Launch | None:
    """Selects the implementation of `op`: launch parameters of the kernel, or None for the
    reference.

    Args:
      op: name of the operation, for messages.
      requested: the required implementation; None: the device decides.
      chips: generations with a GPU kernel, if not all have it.
      refusal: why the GPU kernel does not support these arguments; None if it does.
      tpu_refusal: the same of the TPU kernel.
    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the requested kernel does not exist for the device, or does not support
        the arguments.
    """
    if requested not in (None, *get_args(Implementation)):
        raise ValueError(f"{op}: {requested=} must be one of {get_args(Implementation)}, or None")
    if requested == "reference" or trace().references:
        return None
    assumed = trace().device
    device = assumed or _default_device()
    if requested is None:
        why = _why_not(device, _kernel_of(device), chips, refusal, tpu_refusal)
        _say(op, device, why)
        return Launch(device) if why is None else None
    interpreted = assumed is None and default_device().platform == "cpu"
    if device.platform == "cpu":  # the chip that the interpreter imitates
        device = V6E if requested == "mosaic_tpu" else H200
    if why := _why_not(device, requested, chips, refusal, tpu_refusal):
        raise NotImplementedError(
            f"{op} has no {requested} kernel for this on {device}: {why}; "
            "use implementation='reference'"
        )
    return Launch(device, _interpreter(requested) if interpreted else None)


def _kernel_of(device: Device) -> Implementation:
    """The kind of kernel that a device could run."""
    return "mosaic_tpu" if device.platform == "tpu" else "mosaic_gpu"


def _why_not(
    device: Device,
    kind: Implementation,
    chips: tuple[int, ...],
    refusal: str | None,
    tpu_refusal: str | None,
) -> str | None:
    """Why `device` does not run the kernel of this kind; None if it does."""
    if kind == "mosaic_tpu":
        return tpu_refusal if device.platform == "tpu" else "its kernel is for TPUs"
    if device.platform != "cuda":
        return "its kernel is for NVIDIA GPUs"
    if not chips:
        return "it has no kernel for any chip"
    return refusal if device.sm in chips else f"its kernel is for {targets(chips)}"


def targets(chips: tuple[int, ...]) -> str:
    """Generations (`Device.sm`) by their names in CUDA: "sm_90, sm_100"."""
    return ", ".join(f"sm_{sm}" for sm in chips)


def _interpreter(kind: Implementation) -> Any:
    if kind == "mosaic_tpu":
        return True  # grid steps in order, without the threads and copies of the chip
    # Imported here: a slow import that CPU use does not need.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def default_device() -> jax.Device:
    """The device of arrays that no sharding places: that of `jax.default_device`, else the first of
    this process."""
    chosen = jax.config.jax_default_device
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def _default_device() -> Device:
    return describe(default_device())


def _say(op: str, device: Device, why: str | None) -> None:
    """Logs a choice: one line for all operations without a kernel if the device explains it.

    Otherwise it is a line for each operation and reason.
    """
    if device.platform == "cpu":
        _once(logging.INFO, "all operations run their reference implementation on cpu")
    elif why == NO_TPU_KERNEL:
        where = f"run their reference implementation on {device}"
        _once(logging.WARNING, f"operations without a kernel for TPUs {where}")
    elif device.platform != "tpu" and device.sm not in GENERATIONS:
        kernels = f"the kernels are for TPUs and NVIDIA GPUs: {targets(CHIPS)}"
        where = f"all operations run their reference implementation on {device}"
        _once(logging.WARNING, f"{where}: {kernels}")
    elif why:
        _once(logging.WARNING, f"{op} runs its reference implementation on {device}: {why}")
    else:
        _once(logging.INFO, f"{op} runs its {_kernel_of(device)} implementation on {device}")


@functools.cache
def _once(level: int, message: str) -> None:
    _log.log(level, "%s", message)
