"""Properties of the chips, and which of them have kernels.

They are passed to kernels explicitly: a kernel may be compiled on a machine without a GPU, so it
must not query the default device.
"""

import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Device:
    """One chip.

    Attributes:
      name: as jax names the device.
      sm: generation of an NVIDIA chip, which selects its kernels: 90 Hopper, 100 Blackwell in data
        centres; of other NVIDIA chips the compute capability times ten.
        0 if it is no NVIDIA chip.
      num_sms: streaming multiprocessors.
      smem_bytes: maximum shared memory per block; 0 if it is not known.
      variant: what the compute capability times ten adds to `sm`: 3 for sm_103.
      platform: "cuda", "rocm", "oneapi", "tpu" or "cpu"; another platform as jax names it.
    """

    name: str
    sm: int = 0
    num_sms: int = 0
    smem_bytes: int = 0
    variant: int = 0
    platform: str = "cuda"

    @property
    def arch(self) -> str:
        """The target of an NVIDIA compiler, such as "sm_103"; "" for other chips."""
        return f"sm_{self.sm + self.variant}" if self.sm else ""

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.sm else self.name


H200 = Device("NVIDIA H200", 90, 132, 232_448)
B200 = Device("NVIDIA B200", 100, 148, 232_448)
B300 = Device("NVIDIA B300", 100, 148, 232_448, variant=3)
L4 = Device("NVIDIA L4", 89, 58)
CPU = Device("cpu", platform="cpu")
V5E = Device("TPU v5 lite", platform="tpu")
V6E = Device("TPU v6 lite", platform="tpu")
TPU7X = Device("TPU7x", platform="tpu")

GENERATIONS = {90: H200, 100: B200}
"""A chip of each generation with kernels. An operation may have none for one of them."""

_VARIANTS = {103: 100}
"""Compute capability times ten -> generation whose kernels compile for it, where the two differ."""


def describe(device: jax.Device) -> Device:
    """Properties of a jax device.

    A chip of a generation with kernels that has no entry here gets the shared memory of that
    generation and the number of SMs that it reports.
    """
    if device.platform not in ("gpu", "cuda", "rocm", "oneapi"):
        return Device(device.device_kind, platform=device.platform)
    # jax calls every GPU "gpu"; the version of its plugin distinguishes them.
    version = device.client.platform_version.lower()
    platform = next((x for x in ("cuda", "rocm", "oneapi") if x in version), device.platform)
    if platform != "cuda":
        return Device(device.device_kind, platform=platform)
    known = {chip.name: chip for chip in GENERATIONS.values()}
    if device.device_kind in known:
        return known[device.device_kind]
    capability = re.fullmatch(r"(\d+)\.(\d)", str(device.compute_capability))
    if capability is None:
        return Device(device.device_kind)
    exact = 10 * int(capability[1]) + int(capability[2])
    sm = _VARIANTS.get(exact, exact)
    smem_bytes = GENERATIONS[sm].smem_bytes if sm in GENERATIONS else 0
    return Device(device.device_kind, sm, device.core_count, smem_bytes, exact - sm)
