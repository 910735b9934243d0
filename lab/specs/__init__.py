"""The operations of pallas_kernels and their specs, the shapes that models use: a module each."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from pallas_kernels import dispatch
from pallas_kernels.device import Device


def ops() -> list[str]:
    """Operations with specs."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def specs_of(op: str) -> ModuleType:
    """The specs of an operation, or of a package that has some by its dotted name."""
    return importlib.import_module(f"{op}.specs" if "." in op else f"lab.specs.{op}")


def specs_on(op: str, device: Device) -> dict[str, Any]:
    """Specs of an operation whose kernel exists for a chip."""
    module = specs_of(op)
    chips = getattr(module, "CHIPS", dispatch.CHIPS)
    has_kernel = lambda spec: device.sm in getattr(spec, "chips", chips)
    return {name: spec for name, spec in module.SPECS.items() if has_kernel(spec)}
