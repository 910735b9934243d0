"""What a start needs: packages that only some installations have (`pip install
'peagle-jax[EXTRA]'`), and address space."""

import resource
from importlib.util import find_spec

from peagle_jax.errors import ConfigError

PACKAGES = {
    "gguf": ("gguf",),
    "plots": ("matplotlib",),
    "serve": (
        *("grpc", "grpc_health", "grpc_reflection", "grpc_status", "llguidance"),
        *("prometheus_client", "pydantic", "starlette", "uvicorn"),
    ),
    "structured": ("llguidance",),
    "tensorboard": ("tensorboardX",),
}
"""The packages of each extra, by the names under which Python imports them."""
_LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes. With fewer jax ends within its import, or cannot start its threads."""


def check_address_space() -> None:
    """Raises `ConfigError` if this process may use too little address space to import jax."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < _LEAST_ADDRESS_SPACE:
        least = _LEAST_ADDRESS_SPACE >> 20
        raise ConfigError(
            f"this process may use {most >> 20} MiB of address space; raise it above {least} "
            "(ulimit -v)"
        )


def check_installed(extra: str, what: str) -> None:
    """Raises `ConfigError` if a package of an extra is missing.

    Args:
      what: what needs the extra, as the subject of a sentence.
    """
    for name in PACKAGES[extra]:
        if not is_installed(name):
            command = f"python -m pip install 'peagle-jax[{extra}]'"
            in_clone = f"in a clone python -m pip install -e '.[{extra}]'"
            raise ConfigError(f"{what} needs the package {name}: {command}, or {in_clone}")


def is_installed(name: str) -> bool:
    """Whether a package, or one within another, can be imported. It is not imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
