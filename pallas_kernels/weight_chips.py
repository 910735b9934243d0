"""Selects the `Format` of weight tiles for a chip."""

from pallas_kernels import weight_tiles, weight_tiles_sm90, weight_tiles_sm100
from pallas_kernels.device import Device

_FORMATS = {90: weight_tiles_sm90.Format, 100: weight_tiles_sm100.Format}


def formats_of(device: Device) -> type[weight_tiles.Format]:
    """The `Format` class for `device`, which must be Hopper or Blackwell."""
    return _FORMATS[device.sm]
