"""What commands say of sizes, of keys without effect and of numbers that are not finite."""

from collections.abc import Mapping

from peagle_jax.checkpoint.fields import named
from peagle_jax.checkpoint.values import NotFinite


def size_text(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def unread_text(keys: list[str]) -> list[str]:
    """A line of the keys of config.json without effect, if there are any."""
    return [f"keys of config.json that change nothing: {named(keys)}"] if keys else []


def not_finite_text(found: Mapping[str, NotFinite]) -> str:
    """The number of tensors with NaN or infinity, and the first five names."""
    if not found:
        return "all numbers are finite"
    names = [f"{name} ({counts})" for name, counts in sorted(found.items())[:5]]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{len(found)} tensors hold numbers that are not finite: {', '.join(names)}{more}"
