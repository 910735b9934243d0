"""Facts about the chips that kernels are made for, as frozen objects that are passed to kernels.

A kernel never asks the default device: it may be compiled on a machine that has none.
"""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Device:
    """One chip.

    Attributes:
      name: as jax names the device.
      sm: compute capability, major times ten (90 Hopper, 100 Blackwell).
      num_sms: streaming multiprocessors.
      smem_bytes: shared memory that one block may use.
    """

    name: str
    sm: int
    num_sms: int
    smem_bytes: int


H200 = Device("NVIDIA H200", 90, 132, 232_448)
B200 = Device("NVIDIA B200", 100, 148, 232_448)


def describe(device: jax.Device) -> Device | None:
    """Facts of a jax device; None where no kernel is made for its kind.

    A chip of a known generation whose name is not listed counts as that generation with the number of
    multiprocessors that it reports.
    """
    if device.platform not in ("gpu", "cuda"):
        return None
    known = {chip.name: chip for chip in (H200, B200)}
    if device.device_kind in known:
        return known[device.device_kind]
    sm = 10 * int(str(device.compute_capability).split(".")[0])
    same = [chip for chip in (H200, B200) if chip.sm == sm]
    if not same:
        return None
    return Device(device.device_kind, sm, device.core_count, same[0].smem_bytes)
