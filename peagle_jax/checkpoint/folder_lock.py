"""One writer of a folder at a time, of the processes of this host."""

import errno
import fcntl
import os
from pathlib import Path

from peagle_jax.checkpoint.safetensors import CheckpointError

_NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""By a file system that has no locks: then every process holds them."""


def lock_folder(folder: Path) -> int:
    """A descriptor that holds the lock on a folder until it is closed, or its process ends.

    The folder is made if it is missing.

    Raises:
      CheckpointError: another process holds it.
      OSError: the folder cannot be made.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # renamed by its owner meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(f"{folder}: another run is writing it; wait for it") from error
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                return descriptor
            os.close(descriptor)
            if not isinstance(error, FileNotFoundError):  # the same
                raise
        else:
            os.close(descriptor)
