"""One writer of a folder at a time."""

import fcntl
import os
from pathlib import Path

from peagle_jax.checkpoint.safetensors import CheckpointError


def lock_folder(folder: Path) -> int:
    """A descriptor that holds the lock on a folder until it is closed, or its process ends.

    The folder is made if it is missing.

    Raises:
      CheckpointError: another process holds it.
      OSError: the folder cannot be made.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(f"{folder}: another run is writing it; wait for it") from error
        except FileNotFoundError:
            pass  # renamed by its owner between the two lines above
        os.close(descriptor)
