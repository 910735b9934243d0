"""Folders without a disk behind them: conversion calls fsync, which is slow on a disk."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 4 * 2**30
"""Bytes that must be free. Containers often have 64 MiB there."""


def root() -> Path | None:
    """The folder of shared memory, or None where it is missing or small: then tempfile's own."""
    is_there = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > _ROOM
    return _SHARED_MEMORY if is_there else None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that exists within the block."""
    with tempfile.TemporaryDirectory(dir=root(), ignore_cleanup_errors=True) as name:
        yield Path(name)
