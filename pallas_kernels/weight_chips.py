"""Which kind of weight tiles each chip multiplies."""

from pallas_kernels import weight_tiles, weight_tiles_sm90, weight_tiles_sm100
from pallas_kernels.device import Device

_FORMATS = {90: weight_tiles_sm90.Format, 100: weight_tiles_sm100.Format}


def formats_of(device: Device) -> type[weight_tiles.Format]:
    """The formats of weights as kernels for `device` read them; it is one that has such kernels."""
    return _FORMATS[device.sm]
