"""Properties of the chips with kernels.

They are passed to kernels explicitly: a kernel may be compiled on a machine without a GPU, so it must not
query the default device.
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
      smem_bytes: maximum shared memory per block.
    """

    name: str
    sm: int
    num_sms: int
    smem_bytes: int


H200 = Device("NVIDIA H200", 90, 132, 232_448)
B200 = Device("NVIDIA B200", 100, 148, 232_448)


def describe(device: jax.Device) -> Device | None:
    """Properties of a jax device; None if its generation has no kernels.

    An unlisted chip of a known generation gets the shared memory of that generation and the number of SMs
    that it reports.
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
