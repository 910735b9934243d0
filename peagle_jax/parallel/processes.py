"""Several processes, one on each host, that run one model together."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from peagle_jax.config import ConfigError

_START_SECONDS = 300
_LATER = 10
"""Factor from the caller's limit of silence to jax's own, which is longer, so that the caller ends the processes first
and reports the reason."""


def connect(address: str, num_processes: int, index: int, seconds: float) -> tuple[str, int]:
    """Makes the devices of all processes visible to each. No device may have been used before.

    Compiled programs are kept on disk on CPUs only: on GPUs all processes must compile a program, or none,
    because they share the times by which XLA chooses its kernels.

    Args:
      address: "host:port" of the service that process 0 starts.
      num_processes: one on each host.
      index: number of this process.
      seconds: after which the caller itself ends processes that are silent.

    Returns:
      Kind and number of this process's devices.

    Raises:
      ConfigError: a process is missing, or jax finds no device.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=int(_LATER * max(seconds, 10)),
            coordinator_bind_address=address,
        )
        devices = jax.local_devices()
    except RuntimeError as error:
        raise ConfigError(f"jax cannot connect the hosts at {address}: {error}") from error
    if devices[0].platform != "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    return devices[0].device_kind, len(devices)


def least(num_bytes: int) -> int:
    """The least of the processes' numbers, in whole KiB; of one process its own.

    All processes must call it, in the same order. Sizes that depend on memory are shapes of programs, so
    they must be equal everywhere.
    """
    if jax.process_count() == 1:
        return num_bytes
    # jax has no 64-bit integers here.
    gathered = multihost_utils.process_allgather(np.int32(min(num_bytes >> 10, 2**31 - 1)))
    return int(gathered.min()) << 10
