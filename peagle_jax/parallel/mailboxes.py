"""Mailboxes of `pallas_kernels.peer_gather` on the GPUs of this process. On a CPU, which runs the
reference, there is none."""

import ctypes
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.device import describe
from pallas_kernels.dispatch import CHIPS, targets
from pallas_kernels.peer_gather import mailbox
from peagle_jax.config import ConfigError

DEFAULT_CHIPS = (90,)
"""Generations (`Device.sm`) that have mailboxes by default: those on which messages have run."""
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuDeviceGetP2PAttribute."""
_kept: list[jax.Array] = []
"""All mailboxes of this process. A call under way may store into them after its engine is gone, so
they are never freed."""


class Mailboxes:
    """One mailbox on each GPU, at an address that all of them use.

    Args:
      devices: GPUs by rank.

    Raises:
      ConfigError: these GPUs cannot read each other's memory, or have no such kernel.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        if why := refusal(devices):
            raise ConfigError.of("gather", f"peers: {why}; leave it at auto")
        self._devices, self._boxes, self._are_used = devices, [], False
        if devices[0].platform == "cpu":
            return
        empty = mailbox.empty(len(devices))
        self._boxes = [jax.device_put(empty, device) for device in devices]
        jax.block_until_ready(self._boxes)
        _kept.extend(self._boxes)

    def tables(self) -> list[jax.Array]:
        """int32 [1, LINKS] of each GPU, of mailboxes without a message: to be called once.

        Raises:
          RuntimeError: it was called before; earlier messages would be mistaken for new ones.
        """
        if self._are_used:
            raise RuntimeError("mailboxes have messages: make others")
        self._are_used = True
        addresses = [box.unsafe_buffer_pointer() for box in self._boxes]
        made = [mailbox.table(rank, addresses)[None] for rank in range(len(self._devices))]
        return [jax.device_put(one, at) for one, at in zip(made, self._devices, strict=True)]


def table_shape(count: int) -> jax.ShapeDtypeStruct:
    """The tables of all devices."""
    return jax.ShapeDtypeStruct((count, mailbox.LINKS), jnp.int32)


def refusal_by_default(devices: Sequence[jax.Device]) -> str | None:
    """Why these devices use the library unless asked; None if they have mailboxes by default.

    Some hosts report access over PCIe that their IOMMU does not let through, and a GPU would wait
    in vain.
    """
    if why := refusal(devices):
        return why
    if devices[0].platform == "cpu":
        return "they are CPUs"
    if (sm := describe(devices[0]).sm) not in DEFAULT_CHIPS:
        return f"messages have not run on sm_{sm}"
    for one, other in _pairs(devices):
        if not _has_nvlink(one, other):
            return f"GPU {one} and GPU {other} are not linked by NVLink"
    return None


def refusal(devices: Sequence[jax.Device]) -> str | None:
    """Why these devices have no mailboxes; None if they may have."""
    if len(devices) > mailbox.MOST_DEVICES:
        return f"{len(devices)} devices are more than {mailbox.MOST_DEVICES}"
    if devices[0].platform == "cpu":
        return None
    for device in devices:
        if describe(device).sm not in CHIPS:
            return f"its kernel is for {targets(CHIPS)}, not for {device.device_kind}"
    for one, other in _pairs(devices):
        if not _may_access(one, other):
            return f"GPU {one} cannot access the memory of GPU {other}"
    return None


def _pairs(devices: Sequence[jax.Device]) -> list[tuple[int, int]]:
    """Ordinals of each two different GPUs, in both directions."""
    return list(itertools.permutations([device.local_hardware_id for device in devices], 2))


def _may_access(one: int, other: int) -> bool:
    """Whether the driver can let a GPU access the memory of another, by their ordinals. XLA asks
    the same, and then enables it."""
    return _driver_says("cuDeviceCanAccessPeer", one, other)


def _has_nvlink(one: int, other: int) -> bool:
    """Whether the link between two GPUs has atomic operations, which PCIe has not."""
    return _driver_says("cuDeviceGetP2PAttribute", _NATIVE_ATOMICS, one, other)


def _driver_says(function: str, *arguments: int) -> bool:
    """The answer, yes or no, of a function of CUDA's driver; no if it fails."""
    answer = ctypes.c_int(0)
    error = getattr(ctypes.CDLL("libcuda.so.1"), function)(ctypes.byref(answer), *arguments)
    return error == 0 and bool(answer)
